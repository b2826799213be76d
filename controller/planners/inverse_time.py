"""Batches in inverse proportion to each node's time per sample, so that all nodes compute equally long.

Source: Cannikin (Ma et al., 2024), Eq. 8; bounds and the rounding to whole samples are ours. Communication is left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.controller.planners.bounds import Bounds
from atoll.errors import NoFeasiblePlan


@dataclass(frozen=True, slots=True)
class InverseTimeInput:
    """total_batch: samples of one step. seconds_per_sample: one per node, > 0; bounds: one per node."""

    total_batch: int
    seconds_per_sample: tuple[float, ...]
    bounds: tuple[Bounds, ...]


@dataclass(frozen=True, slots=True)
class InverseTimePlan:
    """batches: whole samples per node, summing to the total batch. continuous: the optimum before rounding.
    step_time: seconds that the slowest node computes with `batches`."""

    batches: tuple[int, ...]
    continuous: tuple[float, ...]
    step_time: float


def split_by_inverse_time(given: InverseTimeInput) -> InverseTimePlan:
    """Minimise max_i b_i t_i with sum b_i = B and the bounds. O(n log n).

    Node i finishes min(max(T / t_i, lo_i), hi_i) samples in time T; the sum grows with T, so its breakpoints are
    walked for the T at which it is B. Whole numbers: rounded down, the rest goes one by one to where the time rises
    least, which is optimal because times grow with batches. Raises NoFeasiblePlan.
    """
    times, bounds, total = given.seconds_per_sample, given.bounds, given.total_batch
    step_s = _common_time(times, bounds, total)
    continuous = tuple(
        min(max(step_s / t, float(b.min_batch)), b.ceiling(total)) for t, b in zip(times, bounds, strict=True)
    )
    batches = _whole(continuous, times, bounds, total)
    step_time = max(b * t for b, t in zip(batches, times, strict=True))
    return InverseTimePlan(batches, continuous, step_time)


def _common_time(times: Sequence[float], bounds: Sequence[Bounds], total: int) -> float:
    """The time T at which all nodes together finish `total` samples."""
    low = sum(b.min_batch for b in bounds)
    high = sum(b.ceiling(total) for b in bounds)
    if not low <= total <= high:
        raise NoFeasiblePlan(f"total_batch = {total} does not fit the bounds, which allow {low} to {high:g} together")
    changes: list[tuple[float, float]] = []
    for t, b in zip(times, bounds, strict=True):
        changes.append((b.min_batch * t, 1 / t))  # from here on it takes more than its minimum
        changes.append((b.ceiling(total) * t, -1 / t))  # from here on it is full
    changes.sort()
    at_s, rate, done = changes[0][0], 0.0, float(low)
    for change_s, change in changes:
        if rate > 0 and done + rate * (change_s - at_s) >= total:
            return at_s + (total - done) / rate
        done += max(rate, 0.0) * (change_s - at_s)
        at_s, rate = change_s, rate + change
    return at_s


def _whole(
    continuous: Sequence[float], times: Sequence[float], bounds: Sequence[Bounds], total: int
) -> tuple[int, ...]:
    """Each within one sample of `continuous`; the last ones where the time rises least, ties to the earlier node."""
    counts = [
        min(max(math.floor(c * (1 + 1e-12)), b.min_batch), int(b.ceiling(total)))
        for c, b in zip(continuous, bounds, strict=True)
    ]
    left = total - sum(counts)
    if left < 0:  # rounding errors in `continuous`: take back where it shortens the step most
        for i in sorted(range(len(counts)), key=lambda i: (-counts[i] * times[i], i)):
            if left < 0 and counts[i] > bounds[i].min_batch:
                counts[i] -= 1
                left += 1
    heap = [
        ((c + 1) * t, i) for i, (c, t) in enumerate(zip(counts, times, strict=True)) if c < bounds[i].ceiling(total)
    ]
    heapq.heapify(heap)
    for _ in range(left):
        _, i = heapq.heappop(heap)
        counts[i] += 1
        if counts[i] < bounds[i].ceiling(total):
            heapq.heappush(heap, ((counts[i] + 1) * times[i], i))
    return tuple(counts)
