"""Find the batches that nodes finish by a common time: the split behind planners that know a fixed cost per step.

A node's time grows with its batch as the maximum of two lines. So the most samples that it finishes by a given time are
the minimum of two lines, cut off at its bounds. Their sum over all nodes grows with the time: one root, found between
sorted breakpoints. Legend of suffixes: N = nodes, C = totals asked for at once, 2 = the two lines."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from atoll.errors import NoFeasiblePlan
from atoll.planning.schemas import Samples, Schema

F64 = NDArray[np.float64]

_MAX_CELLS: Final = 1_000_000
"""Cells, nodes times totals, of one pass: a few arrays of this many float64."""
_FLAT_RATIO: Final = 1e-11
"""Ratio of slopes below which the flatter line counts as flat: it changes the step by less than this part."""


class Bounds(Schema):
    """Smallest and, if the node has a limit, largest number of samples of a node."""

    min_batch: Samples = 0
    max_batch: Samples | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Bounds:
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(
                f"has max_batch = {self.max_batch}, less than its min_batch = {self.min_batch}. "
                "Raise one or lower the other"
            )
        return self

    def ceiling(self, total: int) -> int:
        """Return the most samples of `total` that this node may get."""
        return total if self.max_batch is None else self.max_batch


@dataclass(frozen=True, slots=True)
class PiecewiseTimes:
    """Times of all nodes: time_i(b) = max over two lines of slope_2N[:, i] * b + offset_2N[:, i] seconds, low_N <= b <=
    high_N.

    slope_2N: not negative, and at least one of each node's is positive. high_N: inf for a node without a limit."""

    slope_2N: F64
    offset_2N: F64
    low_N: F64
    high_N: F64

    @classmethod
    def of(cls, slope_2N: F64, offset_2N: F64, bounds: Sequence[Bounds]) -> PiecewiseTimes:
        low = np.array([b.min_batch for b in bounds], dtype=np.float64)
        high = np.array([np.inf if b.max_batch is None else b.max_batch for b in bounds], dtype=np.float64)
        return cls(slope_2N, offset_2N, low, high)

    def at(self, batch_N: F64) -> F64:
        """Return the seconds of each node with its batch. [N]"""
        times: F64 = (self.slope_2N * batch_N + self.offset_2N).max(axis=0)
        return times

    def floor_s(self) -> float:
        """Return a lower bound of any split's seconds: the slowest node with its least batch."""
        return float(self.at(self.low_N).max())

    def require(self, total: int) -> None:
        """Raise NoFeasiblePlan if the bounds cannot hold `total` samples."""
        low = self.low_N.sum()
        if not low <= total <= self.high_N.sum():
            high = np.where(np.isinf(self.high_N), total, self.high_N).sum()
            raise NoFeasiblePlan(
                f"total_batch = {total} does not fit the bounds, which allow {low:g} to {high:g} together. "
                "Choose a total between them or widen max_batch"
            )


class Levels:
    """The breakpoints of `times`, sorted once: O(n log n). Each total then takes O(n)."""

    def __init__(self, times: PiecewiseTimes) -> None:
        self._times = times
        slope, offset = times.slope_2N, times.offset_2N
        # A flat line is a floor of the step, not a limit of the batch: the other line stands in for it here.
        flat = slope <= _FLAT_RATIO * slope.max(axis=0)
        slope, offset = np.where(flat, slope[::-1], slope), np.where(flat, offset[::-1], offset)
        self._rate_2N, self._offset_2N = 1 / slope, offset
        self._level_K, self._held_K, self._last_rate = self._breakpoints(slope, offset)

    def _breakpoints(self, slope: F64, offset: F64) -> tuple[F64, F64, float]:
        """Return the times at which some node's rate (samples a second) changes, the samples of all nodes by then, and
        the rate after the last.

        The samples come from running sums, good to rounding errors only: a guess of where to look."""
        low, high = self._times.low_N, self._times.high_N
        steeper = slope.max(axis=0)
        gap = slope[0] - slope[1]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = np.where(gap != 0, (offset[1] - offset[0]) / gap, -np.inf)  # batch at which the lines meet
        # Below the crossing the flatter line is the higher one.
        first = 1 / np.where(crossing > low, slope.min(axis=0), steeper)
        second = 1 / np.where(crossing < high, steeper, slope.min(axis=0))
        middle = np.clip(crossing, low, np.where(np.isinf(high), np.maximum(crossing, low), high))
        level_3N = np.stack([(slope * b + offset).max(axis=0) for b in (low, middle, high)])
        change_3N = np.stack([first, second - first, -second])
        level, change = level_3N.ravel(), change_3N.ravel()
        finite = np.isfinite(level)
        order = np.argsort(level[finite], kind="stable")
        level, change = level[finite][order], change[finite][order]
        rate = np.cumsum(change)
        held = low.sum() + np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(level))])
        return level, np.maximum.accumulate(held), float(second[np.isinf(high)].sum())

    def split(self, level_C: F64) -> F64:
        """Return the batches [C, N] that end by each time, within bounds."""
        level_C1 = level_C[:, None]
        batch: F64 = (level_C1 - self._offset_2N[0]) * self._rate_2N[0]
        np.minimum(batch, (level_C1 - self._offset_2N[1]) * self._rate_2N[1], out=batch)
        np.maximum(batch, self._times.low_N, out=batch)
        np.minimum(batch, self._times.high_N, out=batch)
        return batch

    def levels(self, total_C: F64) -> F64:
        """Return the times [C] at which the batches sum to each total. The bounds must hold the totals (see
        `require`)."""
        at_once = max(1, _MAX_CELLS // len(self._times.low_N))
        parts = [self._levels(total_C[i : i + at_once]) for i in range(0, len(total_C), at_once)]
        return np.concatenate(parts)

    def _levels(self, total_C: F64) -> F64:
        # The segment of each total: held(low) <= total < held(high). The guess is checked; where rounding misled it,
        # bisection over all breakpoints finds the place.
        points = len(self._level_K)
        low = np.clip(np.searchsorted(self._held_K, total_C, side="right") - 1, 0, points - 1)
        high = low + 1
        below = self._held(self._level_K[low])
        above = self._held(self._level_K[np.minimum(high, points - 1)])
        too_high, too_low = below > total_C, (high < points) & (above <= total_C)
        low[too_high], high[too_low] = 0, points
        while (apart := high - low > 1).any():
            middle = (low + high) // 2
            fits = self._held(self._level_K[middle]) <= total_C
            low, high = np.where(apart & fits, middle, low), np.where(apart & ~fits, middle, high)
        return self._within(low, total_C)

    def _within(self, low: NDArray[np.int64], total_C: F64) -> F64:
        """Return the time in the segment that begins at breakpoint `low`: linear there, from exact values at both
        ends."""
        points = len(self._level_K)
        begin, end = self._level_K[low], self._level_K[np.minimum(low + 1, points - 1)]
        held = self._held(begin)
        span = np.where(low + 1 < points, end - begin, 1.0)
        gained = np.where(low + 1 < points, self._held(end) - held, self._last_rate)
        part = np.divide(total_C - held, gained, out=np.zeros_like(held), where=gained > 0)
        return np.asarray(begin + np.maximum(part, 0) * span, dtype=np.float64)

    def _held(self, level_C: F64) -> F64:
        return np.asarray(self.split(level_C).sum(axis=1), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Filled:
    """Fastest split of a total. batches: whole samples per node. continuous: before rounding; level_s: seconds with
    that."""

    batches: tuple[int, ...]
    continuous: tuple[float, ...]
    level_s: float


def fill(times: PiecewiseTimes, total: int) -> Filled:
    """Split `total` samples so that the slowest node takes the least time. Raises NoFeasiblePlan."""
    times.require(total)
    levels = Levels(times)
    level_1 = levels.levels(np.array([total], dtype=np.float64))
    continuous_N = levels.split(level_1)[0]
    return Filled(tuple(whole(times, continuous_N, total)), tuple(continuous_N.tolist()), float(level_1[0]))


def whole(times: PiecewiseTimes, continuous_N: F64, total: int) -> list[int]:
    """Return whole batches that sum to `total`: rounded down, the rest one by one to where the time rises least. O(n
    log n).

    continuous_N: the result of `Levels.split` at the level of `total`. Optimal, because times do not fall as batches
    grow."""
    slopes, offsets = times.slope_2N.T.tolist(), times.offset_2N.T.tolist()
    low, high = times.low_N.tolist(), times.high_N.tolist()
    batches = [int(b) for b in np.maximum(np.floor(continuous_N), times.low_N)]

    def key(i: int, batch: int) -> tuple[float, float, int]:
        # Where a fixed cost rules, many batches take equally long: the lower line then keeps the split level.
        lines = [slope * batch + offset for slope, offset in zip(slopes[i], offsets[i], strict=True)]
        return max(lines), min(lines), i

    left = total - sum(batches)
    for _ in range(-left):  # rounding errors in `continuous_N`: take back where it shortens the step most
        i = max((i for i, b in enumerate(batches) if b > low[i]), key=lambda i: key(i, batches[i]))
        batches[i] -= 1
    heap = [key(i, b + 1) for i, b in enumerate(batches) if b < high[i]]
    heapq.heapify(heap)
    for _ in range(left):
        i = heapq.heappop(heap)[2]
        batches[i] += 1
        if batches[i] < high[i]:
            heapq.heappush(heap, key(i, batches[i] + 1))
    return batches
