"""Fits the time of a local batch of b on a device: q b + s for load, forward and update, k b + m for backward.

Source: Cannikin (Ma et al., 2024), Eq. 1-3 and section 4.5: least squares over at least two distinct local batches,
recent ones weigh more. Ours: each batch counts by the median of its newest steps, so outliers move nothing; how much
an old batch still says falls as if the device's speed walked at random; and a device that becomes slower or faster as
a whole, which shows at one batch only, takes the steps at all others along.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from operator import add
from statistics import median
from typing import Final

from atoll.step_estimators.estimates import BatchPoint, NodeEstimate
from atoll.step_estimators.line_fit import BatchLevel, fit_line
from atoll.step_estimators.robust import ChangeDetector, median_error, spread

WINDOW_STEPS: Final = 16
"""Remembered steps of each batch: half of them move the median, so a change too small to detect is followed within
eight."""
NEEDED_STEPS: Final = 3
"""A batch seen fewer times is not used: its median would be an outlier's if one of two were."""
KEPT_BATCHES: Final = 8
_SURE: Final = 0.005
"""Relative error below which no batch's median is believed to be."""
_WALK: Final = 0.002
"""Standard deviation of the random walk of a device's speed: relative, after one step."""
_OWN_STEPS: Final = 6
"""Steps of a batch from which its own median is the reference of further steps; before, the model is."""
_RENEWED: Final = 4
"""Steps after which that median is found again."""
_CURVED: Final = 0.1
"""Deviation of a device from a straight line, as a share: a new batch that takes so much longer than the model says
is no sign of a slower device."""
_FIRST_NOISE: Final = 0.03
_NOISE_GAIN: Final = 0.05
_NOISE_CLIP: Final = 0.3


@dataclass(frozen=True, slots=True)
class _Reference:
    """Expected time of a batch's next steps without a change. noise: relative standard deviation of a step's time.
    count: steps of the batch when this was found; 0 if the model gave it."""

    level: BatchLevel
    noise: float
    count: int


class _Batch:
    """The newest steps with one local batch: (step, others_s, backward_s). stale: measured before the device's speed
    changed."""

    __slots__ = ("_level", "count", "reference", "stale", "steps")

    def __init__(self) -> None:
        self.stale = False
        self._begin()

    def _begin(self) -> None:
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=WINDOW_STEPS)
        self.reference: _Reference | None = None
        self.count = 0  # since it was new or stale
        self._level: BatchLevel | None = None

    @property
    def newest(self) -> int:
        return self.steps[-1][0] if self.steps else -1

    def add(self, step: int, others_s: float, backward_s: float) -> None:
        self.steps.append((step, others_s, backward_s))
        self.count += 1
        self._level = None

    def renew(self) -> None:
        """Forget what is stale, before a step of now."""
        if self.stale:
            self._begin()
            self.stale = False

    def level(self) -> BatchLevel | None:
        """Return the medians; None while too few steps were seen."""
        if self._level is None and len(self.steps) >= NEEDED_STEPS:
            _, others_s, backward_s = zip(*self.steps, strict=True)
            sums = list(map(add, others_s, backward_s))
            centre = median(sums)
            error = median_error(spread(sums, centre), len(sums)) / centre
            others, backward = median(others_s), median(backward_s)
            self._level = BatchLevel(others, backward, others + backward, math.hypot(error, _SURE))
        return self._level

    def forget_before(self, step: int) -> None:
        while self.steps and self.steps[0][0] < step:
            self.steps.popleft()
        self.reference, self.count, self._level = None, len(self.steps), None

    def scale(self, others: float, backward: float) -> None:
        self.steps = deque(((step, a * others, p * backward) for step, a, p in self.steps), WINDOW_STEPS)
        self._level = None


@dataclass(frozen=True, slots=True)
class _Anchor:
    """Time of a batch before a change of speed; its time now shows the factor for all batches."""

    batch: int
    before: BatchLevel


class StepModel:
    """Model of one rank's steps: at most KEPT_BATCHES local batches of WINDOW_STEPS steps each."""

    def __init__(self) -> None:
        self._newest = -1
        self._in_parts: bool | None = None
        self._forget()

    def _forget(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._change = ChangeDetector()
        self._noise = _FIRST_NOISE
        self._anchor: _Anchor | None = None
        self._points: tuple[BatchPoint, ...] = ()
        self._estimate: NodeEstimate | None = None
        self._fresh = True  # whether these two are of all steps seen

    def observe(self, step: int, local_batch: int, others_s: float, backward_s: float) -> int | None:
        """One more step; others_s: load, forward and update. Where parts were not measured: all of it, backward_s 0.

        Returns None, or the step from which the device has had another speed, once that is sure. Steps must ascend and
        times be finite, not negative and not both 0.
        """
        if self._in_parts != (backward_s > 0):
            self._forget()  # times in parts and times as a whole have no model in common
        self._in_parts = backward_s > 0
        self._newest = step
        batch = self._batches.get(local_batch) or self._open(local_batch)
        batch.renew()
        reference = batch.reference = self._reference(local_batch, batch)
        changed = False
        if reference is not None:
            deviation = math.log((others_s + backward_s) / reference.level.compute_s)
            changed = self._change.observe(step, deviation, reference.noise, reference.level.error)
            if reference.count:
                self._noise += _NOISE_GAIN * (1.2533 * min(abs(deviation), _NOISE_CLIP) - self._noise)
        batch.add(step, others_s, backward_s)
        self._fresh = False
        if not changed or reference is None:
            return None
        since = self._change.suspects_from(step)
        self._begin_anew(since, _Anchor(local_batch, reference.level))
        return since

    def _reference(self, local_batch: int, batch: _Batch) -> _Reference | None:
        """Return the expected time of a batch: its own median, else the model's value with its error."""
        known = batch.reference
        if batch.count < _OWN_STEPS:
            return known or self._modelled(local_batch)
        if known is not None and known.count and (self._change.suspicious or batch.count < known.count + _RENEWED):
            return known  # while a change is suspected the median may be of both speeds
        if known is None or not known.count:
            self._change.reset()  # what spoke for a change may have been the model's error
        level = batch.level()
        if level is None:
            return None
        spread_here = level.error * math.sqrt(len(batch.steps)) / median_error(1.0, 1)
        return _Reference(level, max(self._noise, spread_here), batch.count)

    def _modelled(self, local_batch: int) -> _Reference | None:
        estimate = self.estimate()
        if estimate is None:
            return None
        beyond = 1 if estimate.low_batch <= local_batch <= estimate.high_batch else 3
        error = beyond * estimate.error
        a, p = estimate.q * local_batch + estimate.s, estimate.k * local_batch + estimate.m
        if not a + p > 0:
            return None
        return _Reference(BatchLevel(a, p, a + p, error), math.hypot(self._noise, error, _CURVED), 0)

    def _open(self, local_batch: int) -> _Batch:
        if len(self._batches) == KEPT_BATCHES:
            oldest = min(self._batches, key=lambda each: self._batches[each].newest)
            if self._anchor is not None and self._anchor.batch == oldest:
                self._rescale()
            del self._batches[oldest]
        return self._batches.setdefault(local_batch, _Batch())

    def _begin_anew(self, since: int, anchor: _Anchor) -> None:
        """The device has had another speed from step `since` on."""
        self._rescale()
        for batch in self._batches.values():
            if batch.newest >= since:
                batch.forget_before(since)
            else:
                batch.stale = True
        self._anchor = anchor
        self._change.reset()

    def _rescale(self) -> None:
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

    def _levels(self) -> list[tuple[int, BatchLevel]]:
        """(local batch, medians as of now), ascending."""
        others, backward, scale_error = self._scale()
        found = []
        for local_batch, batch in sorted(self._batches.items()):
            level = batch.level()
            if level is None:
                continue
            error = math.hypot(level.error, _WALK * math.sqrt(self._newest - batch.newest))
            if batch.stale:
                level = level.times(others, backward, math.hypot(error, scale_error))
            elif error != level.error:
                level = level.times(1.0, 1.0, error)
            found.append((local_batch, level))
        return found

    def _refresh(self) -> None:
        if self._fresh:
            return
        levels = self._levels()
        newest = max((batch for batch, _ in levels), key=lambda batch: self._batches[batch].newest, default=0)
        self._estimate = fit_line(levels, newest) if len(levels) > 1 else None
        self._points = tuple([BatchPoint(batch, level.compute_s, level.error) for batch, level in levels])
        self._fresh = True

    def points(self) -> tuple[BatchPoint, ...]:
        """Return the present time of each local batch, by ascending batch."""
        self._refresh()
        return self._points

    def estimate(self) -> NodeEstimate | None:
        """None before two distinct local batches were seen often enough."""
        self._refresh()
        return self._estimate
