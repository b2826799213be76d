"""Splits a batch into whole samples by relative shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.errors import BadInput


def split_batch(total: int, shares: Sequence[float], least: int = 1) -> list[int]:
    """Split `total` samples over the ranks by largest remainder, ties to the lower rank.

    shares: one per rank, relative, finite and > 0; whole numbers that sum to `total` come back as they are.
    least: samples of a rank that has any, >= 1; a total below it goes out by largest remainder as it is.
    Returns one count per rank; they sum to `total`, and each is at least `least` where the total suffices for that.
    Where it does not, the smallest shares get nothing.
    Raises BadInput for a negative total, no shares, or a share that is not a positive finite number."""
    if total < 0:
        raise BadInput(f"a batch of {total} samples cannot be split; it must hold 0 or more")
    weights = _as_integers(shares)
    counts = _largest_remainder(total, weights)
    room = min(total // least, len(weights))  # ranks that can have `least`
    if room == 0 or all(count >= least or (count == 0 and room < len(weights)) for count in counts):
        return counts
    largest = sorted(sorted(range(len(weights)), key=lambda rank: (-weights[rank], rank))[:room])
    counts = [0] * len(weights)
    for rank, count in zip(largest, _at_least(least, total, [weights[rank] for rank in largest]), strict=True):
        counts[rank] = count
    return counts


def _as_integers(shares: Sequence[float]) -> list[int]:
    """The shares times one common power of two: exact, so that every rank of every machine rounds alike."""
    if not shares:
        raise BadInput("no shares were given; there must be one per rank")
    for rank, share in enumerate(shares):
        if not (share > 0 and math.isfinite(share)):  # "not >", so that NaN is refused too
            raise BadInput(f"the share of rank {rank} is {share!r}; every share must be a finite number above 0")
    ratios = [float(share).as_integer_ratio() for share in shares]
    scale = max(denominator for _, denominator in ratios)
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    whole = sum(weights)
    parts = [divmod(total * weight, whole) for weight in weights]
    counts = [count for count, _ in parts]
    by_remainder = sorted(range(len(parts)), key=lambda rank: (-parts[rank][1], rank))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def _at_least(least: int, total: int, weights: Sequence[int]) -> list[int]:
    """Ranks due less than `least` get that; the others share the rest, which may push more of them below it."""
    free = list(range(len(weights)))
    while True:
        left = total - least * (len(weights) - len(free))
        whole = sum(weights[rank] for rank in free)
        due_more = [rank for rank in free if left * weights[rank] >= least * whole]
        if len(due_more) == len(free):
            break
        free = due_more
    counts = [least] * len(weights)
    for rank, count in zip(free, _largest_remainder(left, [weights[rank] for rank in free]), strict=True):
        counts[rank] = count
    return counts
