"""Compute the probability that a checkpoint is still in CPU memory after k machines were lost at once. Exact."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def recovery_probabilities(block_sizes: Sequence[int], replicas: int) -> tuple[float, ...]:
    """Return the probabilities for k = 1 .. min(N, 2m) lost of N machines in all blocks; each set of k is equally
    probable.

    block_sizes: m for a group, whose members hold the replicas of all of them; m + 1 to 2m - 1 for a ring, whose
    members hold those of the m - 1 before them. replicas: m >= 1. Counted in whole numbers and divided once: no error
    but that of float64. Gemini (Wang et al., 2023) has a lower bound for k >= 2m, Corollary 6.1, and nothing for
    rings."""
    machines = sum(block_sizes)
    most = min(machines, 2 * replicas)
    rings = [size for size in block_sizes if size > replicas]
    survivable = _groups(len(block_sizes) - len(rings), replicas, most)
    for size in rings:
        ring = [_ring(size, replicas, k) for k in range(min(size, most) + 1)]
        survivable = [
            sum(ring[i] * survivable[k - i] for i in range(min(k, len(ring) - 1) + 1)) for k in range(most + 1)
        ]
    return tuple(survivable[k] / comb(machines, k) for k in range(1, most + 1))


def _groups(groups: int, m: int, most: int) -> list[int]:
    """Count the sets of k = 0 .. most machines that contain no whole group, by inclusion and exclusion over the
    groups."""
    return [
        sum((-1) ** j * comb(groups, j) * comb(m * (groups - j), k - m * j) for j in range(min(groups, k // m) + 1))
        for k in range(most + 1)
    ]


def _ring(size: int, m: int, k: int) -> int:
    """Count the sets of k machines of a ring in which no m are consecutive.

    With size < 2m a set has at most one such run, so each is counted once, by the start of its run: the machine before
    the start survives, m from there on are lost, the rest is free."""
    lost = 1 if k == size else size * comb(size - m - 1, k - m) if k >= m else 0
    return comb(size, k) - lost
