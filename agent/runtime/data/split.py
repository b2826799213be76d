"""Splits a batch into whole samples by relative shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.errors import BadInput


def split_batch(total: int, shares: Sequence[float]) -> list[int]:
    """Split `total` samples over the ranks by largest remainder, ties to the lower rank.

    shares: one per rank, relative, finite and > 0; whole numbers that sum to `total` come back as they are.
    Returns one count per rank; they sum to `total`, and each is at least 1 where `total` >= the number of ranks.
    Raises BadInput for a negative total, no shares, or a share that is not a positive finite number."""
    if total < 0:
        raise BadInput(f"a batch of {total} samples cannot be split; it must hold 0 or more")
    weights = _as_integers(shares)
    counts = _largest_remainder(total, weights)
    if total < len(weights) or min(counts) > 0:
        return counts
    return _at_least_one(total, weights)


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


def _at_least_one(total: int, weights: Sequence[int]) -> list[int]:
    """Ranks due less than one sample get one; the others share the rest, which may push more of them below one."""
    free = list(range(len(weights)))
    while True:
        left = total - (len(weights) - len(free))
        whole = sum(weights[rank] for rank in free)
        due_one = [rank for rank in free if left * weights[rank] >= whole]
        if len(due_one) == len(free):
            break
        free = due_one
    counts = [1] * len(weights)
    for rank, count in zip(free, _largest_remainder(left, [weights[rank] for rank in free]), strict=True):
        counts[rank] = count
    return counts
