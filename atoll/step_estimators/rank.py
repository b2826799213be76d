"""Estimates of one rank of a run: seconds that it computes, waits, and takes for a whole step; its overlap."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import fields
from operator import attrgetter
from statistics import median
from typing import Final

from atoll.step_estimators.estimates import RankEstimate, RankProfile
from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.robust import ClippedMean, median_error, spread
from atoll.step_estimators.step_model import StepModel

SKIPPED_STEPS: Final = 2
"""The first steps of a run pay for allocations, autotuning and cold caches."""
NEEDED_STEPS: Final = 5
WINDOW_STEPS: Final = 32
WHOLE_STEPS: Final = 16
"""Remembered steps for the time from boundary to boundary: half as many follow a lasting change."""
LONG_S: Final = 2.0
"""A step this long under a new plan that gives the rank the same batch: what it computed before counts on, for five
more such steps are too long to go on with a plan that does not fit."""
SHORTEST_S: Final = 1e-9
LONGEST_S: Final = 1e6
"""Longest valid step, in seconds: no step takes eleven days. Squares fit into float64."""
_STALL_GAIN: Final = 0.2
_amounts: Final = attrgetter(*(field.name for field in fields(ObservedStep) if field.type == "float"), "stall_s")
"""Seconds and squared norms of a step."""


class RankEstimator:
    """Bounded: WINDOW_STEPS steps under the newest plan, and a step model."""

    def __init__(self) -> None:
        self.plan = 0
        self.total_batch = 0  # the largest under the plan: an epoch's last batch may be short
        self.last_step = -1
        self.stall_share = 0.0
        self._skipped = 0
        self._local_batch = 0
        self._computed: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)  # (step, seconds)
        self._whole: deque[float] = deque(maxlen=WHOLE_STEPS)
        self._gamma = ClippedMean()
        self._measured = False
        self._model = StepModel()
        self._trained_batch = 0
        self._memory = (0, 0, 0)  # newest max_batch, peak_bytes and memory_bytes
        self._known = RankEstimate()
        self._fresh = True  # whether that is of all steps seen

    def observe(self, observed: ObservedStep) -> bool:
        """One more step. False, and nothing changes, for repeated, older and senseless ones and a run's first."""
        if observed.step <= self.last_step or observed.plan < self.plan or not _sound(observed):
            return False
        self.last_step = observed.step
        self._trained_batch = max(self._trained_batch, -(-observed.local_batch // observed.passes))
        if observed.peak_bytes:
            self._memory = (observed.max_batch, observed.peak_bytes, observed.memory_bytes)
        self._fresh = False
        if observed.plan > self.plan or observed.total_batch > self.total_batch:
            same_batch = observed.total_batch == self.total_batch and observed.local_batch == self._local_batch
            keep = NEEDED_STEPS - 1 if same_batch and observed.step_s >= LONG_S else 0
            self.plan, self.total_batch = observed.plan, observed.total_batch
            self._forget(keep)
        if self._skipped < SKIPPED_STEPS:
            self._skipped += 1
            return False
        parts_s = observed.load_s + observed.forward_s + observed.update_s
        in_parts = observed.backward_s > 0
        changed_since = self._model.observe(
            observed.step, observed.local_batch, parts_s if in_parts else observed.compute_s, observed.backward_s
        )
        if observed.total_batch == self.total_batch:
            self._observe_window(observed)
        if changed_since is not None:
            while self._computed and self._computed[0][0] < changed_since:
                self._computed.popleft()
        if observed.step_s > 0:
            self.stall_share += _STALL_GAIN * (min(observed.stall_s / observed.step_s, 1.0) - self.stall_share)
        if 0 < observed.first_bucket_s <= observed.backward_s:
            self._gamma.observe(observed.first_bucket_s / observed.backward_s)
        self._measured = True
        return True

    def _observe_window(self, observed: ObservedStep) -> None:
        if observed.local_batch != self._local_batch:
            self._local_batch = observed.local_batch
            self._forget()
        self._computed.append((observed.step, observed.compute_s))
        if observed.step_s > 0:
            self._whole.append(observed.step_s)

    def _forget(self, but_newest: int = 0) -> None:
        while len(self._computed) > but_newest:
            self._computed.popleft()
        self._whole.clear()

    def estimate(self) -> RankEstimate:
        """Return the estimate from all steps so far."""
        if not self._fresh:
            variance = self._gamma.variance_of_mean()
            self._known = RankEstimate(
                plan=self.plan,
                total_batch=self.total_batch,
                last_step=self.last_step,
                step_s=median(self._whole) if self._whole else 0.0,
                whole_steps=len(self._whole),
                stall_share=self.stall_share,
                gamma=self._gamma.mean if math.isfinite(variance) else 0.0,
                gamma_variance=variance,
                measured=self._measured,
                profile=self._profile(),
            )
            self._fresh = True
        return self._known

    def _profile(self) -> RankProfile | None:
        """None before enough steps under the newest plan."""
        if len(self._computed) < NEEDED_STEPS:
            return None
        times = [seconds for _, seconds in self._computed]
        centre = median(times)
        max_batch, peak_bytes, memory_bytes = self._memory
        return RankProfile(
            plan=self.plan,
            local_batch=self._local_batch,
            compute_s=centre,
            compute_error_s=median_error(spread(times, centre), len(times)),
            steps=len(times),
            estimate=self._model.estimate(),
            points=self._model.points(),
            trained_batch=self._trained_batch,
            max_batch=max_batch,
            peak_bytes=peak_bytes,
            memory_bytes=memory_bytes,
        )


def _sound(observed: ObservedStep) -> bool:
    """Return True if all numbers are finite and not negative, and the compute time is possible."""
    if observed.local_batch < 0 or observed.total_batch < observed.local_batch or observed.total_batch == 0:
        return False
    numbers = _amounts(observed)
    if not (math.isfinite(sum(numbers)) and min(numbers) >= 0):
        return False
    parts_s = observed.load_s + observed.forward_s + observed.update_s + observed.backward_s
    least_s = min(observed.compute_s, parts_s) if observed.backward_s > 0 else observed.compute_s
    return least_s >= SHORTEST_S and max(observed.compute_s, parts_s, observed.step_s) <= LONGEST_S
