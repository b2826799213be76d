"""How long a device computes with a local batch of b: q b + s for load, forward and update, k b + m for backward.

Source: Cannikin (Ma et al., 2024), Eq. 1-3 and section 4.5: least squares over at least two distinct local batches,
recent ones weigh more. Ours: each batch counts by the median of its newest steps, so outliers move nothing; how much
an old batch still says falls as if the device's speed walked at random; and a device that becomes slower or faster as
a whole, which shows at one batch only, takes the steps at all others along.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from atoll.controller.estimators.profile import BatchPoint, NodeEstimate
from atoll.controller.estimators.robust import ChangeDetector, median, median_error, spread

WINDOW_STEPS: Final = 16
"""Of each batch: half of them move the median, so a change too small to be told as one is followed within eight."""
NEEDED_STEPS: Final = 3
"""A batch seen fewer times is not used: its median would be an outlier's if one of two were."""
KEPT_BATCHES: Final = 8
_SURE: Final = 0.005
"""Relative error below which no batch's median is believed to be."""
_WALK: Final = 0.002
"""Standard deviation of the random walk of a device's speed: relative, after one step."""
_LEAST_SLOPE: Final = 0.01
"""Samples take at least this part of the time: planners need q + k > 0."""
_EDGE: Final = 0.1
"""The error is that of a prediction this part below and above the batches seen."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Medians in seconds. noise: relative standard deviation of one step. steps: measured."""

    others_s: float
    backward_s: float
    noise: float
    steps: int

    @property
    def compute_s(self) -> float:
        return self.others_s + self.backward_s

    @property
    def error(self) -> float:
        """Relative standard error of compute_s."""
        return math.hypot(median_error(self.noise, self.steps), _SURE)


class _Batch:
    """The newest steps with one local batch: (step, others_s, backward_s). stale: measured before the device's speed
    changed."""

    __slots__ = ("_level", "stale", "steps")

    def __init__(self) -> None:
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=WINDOW_STEPS)
        self.stale = False
        self._level: _Level | None = None

    @property
    def newest(self) -> int:
        return self.steps[-1][0] if self.steps else -1

    def add(self, step: int, others_s: float, backward_s: float) -> None:
        if self.stale:
            self.steps.clear()
            self.stale = False
        self.steps.append((step, others_s, backward_s))
        self._level = None

    def level(self) -> _Level | None:
        """None while too few steps were seen."""
        if self._level is None:
            self._level = _level(list(self.steps))
        return self._level

    def level_before(self, step: int) -> _Level | None:
        """Of the steps before this one."""
        if self.newest < step:
            return self.level()
        return _level([each for each in self.steps if each[0] < step])

    def forget_before(self, step: int) -> None:
        while self.steps and self.steps[0][0] < step:
            self.steps.popleft()
        self._level = None

    def scale(self, others: float, backward: float) -> None:
        scaled = [(step, a * others, p * backward) for step, a, p in self.steps]
        self.steps.clear()
        self.steps.extend(scaled)
        self._level = None


def _level(steps: list[tuple[int, float, float]]) -> _Level | None:
    if len(steps) < NEEDED_STEPS:
        return None
    sums = [a + p for _, a, p in steps]
    centre = median(sums)
    return _Level(
        median([a for _, a, _ in steps]),
        median([p for _, _, p in steps]),
        spread(sums, centre) / centre if centre > 0 else 0.0,
        len(steps),
    )


@dataclass(frozen=True, slots=True)
class _Anchor:
    """Where a change of speed showed: what this batch took before. What it takes now tells by how much all changed."""

    batch: int
    before: _Level


class StepModel:
    """Of one rank. Bounded: KEPT_BATCHES local batches of WINDOW_STEPS steps each."""

    def __init__(self) -> None:
        self._newest = -1
        self._in_parts: bool | None = None
        self._forget()

    def _forget(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._change = ChangeDetector()
        self._anchor: _Anchor | None = None
        self._estimate: NodeEstimate | None = None
        self._fresh = True  # whether _estimate is of all steps seen

    def observe(self, step: int, local_batch: int, others_s: float, backward_s: float) -> int | None:
        """One more step; others_s: load, forward and update. Where parts were not measured: all of it, backward_s 0.

        Returns None, or the step from which the device has had another speed, once that is sure. Steps must ascend and
        times be finite, not negative and not both 0.
        """
        if self._in_parts != (backward_s > 0):
            self._forget()  # times in parts and times as a whole have no model in common
        self._in_parts = backward_s > 0
        self._newest = step
        batch = self._batches.get(local_batch)
        before = self._expected(step, local_batch, batch)
        changed = False
        if before is None:
            self._change.reset()
        else:
            deviation = math.log((others_s + backward_s) / before.compute_s)
            changed = self._change.observe(step, deviation, before.noise)
        if batch is None:
            batch = self._open(local_batch)
        batch.add(step, others_s, backward_s)
        self._fresh = False
        if not changed or before is None:
            return None
        since = self._change.suspects_from(step)
        self._begin_anew(since, _Anchor(local_batch, before))
        return since

    def _expected(self, step: int, local_batch: int, batch: _Batch | None) -> _Level | None:
        """What this batch should take if nothing changed: as before, else as the model says with its error."""
        if batch is not None and not batch.stale:
            before = batch.level_before(self._change.suspects_from(step))
            if before is not None and before.compute_s > 0:
                return before
        estimate = self.estimate()
        if estimate is None or not estimate.compute_s(local_batch) > 0:
            return None
        a, p = estimate.q * local_batch + estimate.s, estimate.k * local_batch + estimate.m
        noise = max((level.noise for b in self._batches.values() if (level := b.level())), default=0.0)
        beyond = 1 if estimate.low_batch <= local_batch <= estimate.high_batch else 3
        return _Level(a, p, math.hypot(noise, beyond * estimate.error), WINDOW_STEPS)

    def _open(self, local_batch: int) -> _Batch:
        if len(self._batches) == KEPT_BATCHES:
            oldest = min(self._batches, key=lambda each: self._batches[each].newest)
            if self._anchor is not None and self._anchor.batch == oldest:
                self._settle()
            del self._batches[oldest]
        return self._batches.setdefault(local_batch, _Batch())

    def _begin_anew(self, since: int, anchor: _Anchor) -> None:
        """The device has had another speed from step `since` on."""
        self._settle()
        for batch in self._batches.values():
            if batch.newest >= since:
                batch.forget_before(since)
            else:
                batch.stale = True
        self._anchor = anchor
        self._change.reset()

    def _settle(self) -> None:
        """Stale steps are scaled for good to what the device's speed is now."""
        others, backward, _ = self._scale()
        for batch in self._batches.values():
            if batch.stale:
                batch.scale(others, backward)
        self._anchor = None

    def _scale(self) -> tuple[float, float, float]:
        """Factors for others_s and backward_s of stale steps, and the relative error that they add."""
        anchor = self._anchor
        now = self._batches[anchor.batch].level() if anchor is not None and anchor.batch in self._batches else None
        if anchor is None or now is None:
            return 1.0, 1.0, 0.0
        before = anchor.before
        others = now.others_s / before.others_s if before.others_s > 0 else 1.0
        backward = now.backward_s / before.backward_s if before.backward_s > 0 else 1.0
        return others, backward, math.hypot(now.error, before.error)

    def _levels(self) -> list[tuple[int, _Level, float]]:
        """(local batch, medians as of now, their relative standard error), ascending."""
        others, backward, scale_error = self._scale()
        found = []
        for local_batch, batch in sorted(self._batches.items()):
            level = batch.level()
            if level is None or not level.compute_s > 0:
                continue
            error = math.hypot(level.error, _WALK * math.sqrt(self._newest - batch.newest))
            if batch.stale:
                level = _Level(level.others_s * others, level.backward_s * backward, level.noise, level.steps)
                error = math.hypot(error, scale_error)
            found.append((local_batch, level, error))
        return found

    def points(self) -> tuple[BatchPoint, ...]:
        """What each local batch takes as of now, by ascending batch."""
        return tuple(
            BatchPoint(local_batch=batch, compute_s=level.compute_s, error=error)
            for batch, level, error in self._levels()
        )

    def estimate(self) -> NodeEstimate | None:
        """None before two distinct local batches were seen often enough."""
        if not self._fresh:
            self._estimate = _fit(self._levels())
            self._fresh = True
        return self._estimate


def _fit(levels: list[tuple[int, _Level, float]]) -> NodeEstimate | None:
    """Weighted least squares, each coefficient at least 0."""
    if len(levels) < 2:
        return None
    batches = [float(batch) for batch, _, _ in levels]
    weights = [1 / (error * level.compute_s) ** 2 for _, level, error in levels]
    q, s = _line(batches, [level.others_s for _, level, _ in levels], weights)
    k, m = _line(batches, [level.backward_s for _, level, _ in levels], weights)
    low, high = levels[0][0], levels[-1][0]
    least = _LEAST_SLOPE * ((q + k) * high + s + m) / high
    if q + k < least:
        more = least - (q + k)
        q, s = q + more, max(s - more * high, 0.0)
    # Of the sum, as both lines were fitted with the same weights.
    weight = math.fsum(weights)
    middle = math.fsum(w * b for w, b in zip(weights, batches, strict=True)) / weight
    lever = math.fsum(w * (b - middle) ** 2 for w, b in zip(weights, batches, strict=True))
    misfit = 1.0
    if len(levels) > 2:
        residuals = (level.compute_s - (q + k) * batch - s - m for batch, level, _ in levels)
        square = math.fsum(w * r * r for w, r in zip(weights, residuals, strict=True))
        misfit = max(1.0, square / (len(levels) - 2))
    error = max(
        math.sqrt(misfit * (1 / weight + (batch - middle) ** 2 / lever)) / ((q + k) * batch + s + m)
        for batch in (low * (1 - _EDGE), high * (1 + _EDGE))
        if (q + k) * batch + s + m > 0
    )
    return NodeEstimate(q=q, s=s, k=k, m=m, error=error, low_batch=low, high_batch=high)


def _line(x: list[float], y: list[float], weights: list[float]) -> tuple[float, float]:
    """Slope and intercept, neither negative, with the least weighted sum of squares."""
    weight = math.fsum(weights)
    mean_x = math.fsum(w * a for w, a in zip(weights, x, strict=True)) / weight
    mean_y = math.fsum(w * b for w, b in zip(weights, y, strict=True)) / weight
    lever = math.fsum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    slope = math.fsum(w * (a - mean_x) * b for w, a, b in zip(weights, x, y, strict=True)) / lever
    if slope <= 0:
        return 0.0, mean_y
    if mean_y >= slope * mean_x:
        return slope, mean_y - slope * mean_x
    square = math.fsum(w * a * a for w, a in zip(weights, x, strict=True))
    return math.fsum(w * a * b for w, a, b in zip(weights, x, y, strict=True)) / square, 0.0
