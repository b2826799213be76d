"""What a lower compression rate costs the devices: selecting, summing and applying more entries takes time of theirs.

Learned where the rate changes and the batch does not: the difference of what a rank computes before and after, over the
difference of what is kept. So slow drifts cancel out, and a step's model needs to know nothing of rates: it is always
of the present one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from atoll.controller.estimators.profile import RateCostEstimate
from atoll.controller.estimators.robust import median, median_error, spread
from atoll.controller.estimators.seen import StepSeen

WINDOW_STEPS: Final = 16
NEEDED_STEPS: Final = 6
SKIPPED_STEPS: Final = 2
"""After a change: what was selected at the old rate is still under way."""
LEAST_CHANGE: Final = 0.001
"""Of the share kept: what a smaller change does drowns in noise."""
KEEP: Final = 0.9
"""Weight of what was known at each new difference."""
_PRIOR: Final = 1.5
"""Standard deviation, in steps per unit of what is kept, of what is believed before any change was seen: none."""


@dataclass(slots=True)
class _Level:
    """The newest steps of a rank with one batch at one rate."""

    local_batch: int
    rate: float
    skipped: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def measured(self) -> tuple[float, float] | None:
        """Median and its standard error; None before enough steps."""
        if len(self.times_s) < NEEDED_STEPS:
            return None
        centre = median(self.times_s)
        error = median_error(spread(self.times_s, centre), len(self.times_s))
        return centre, max(error, 0.002 * centre)


class RateCostEstimator:
    """Of one run. Bounded: two levels a rank and three sums."""

    def __init__(self) -> None:
        self._now: dict[int, _Level] = {}
        self._before: dict[int, _Level] = {}
        self._weight = self._weighted = 0.0
        self._compute_s = 0.0

    def observe(self, rank: int, seen: StepSeen) -> None:
        """One more step of a rank, its times finite and not negative. Without a rate (dense) nothing is learned."""
        if not 0 < seen.rate < 1:
            return
        now = self._now.get(rank)
        if now is None or (now.local_batch, now.rate) != (seen.local_batch, seen.rate):
            if now is not None:
                self._before[rank] = now
            self._now[rank] = now = _Level(seen.local_batch, seen.rate)
        if now.skipped < SKIPPED_STEPS:
            now.skipped += 1
            return
        now.times_s.append(seen.compute_s)
        if len(now.times_s) == WINDOW_STEPS and rank in self._before:
            self._compare(self._before.pop(rank), now)

    def _compare(self, before: _Level, now: _Level) -> None:
        was, became, more = before.measured(), now.measured(), before.rate - now.rate
        if was is None or became is None or before.local_batch != now.local_batch or abs(more) < LEAST_CHANGE:
            return
        weight = more * more / (was[1] ** 2 + became[1] ** 2)
        self._weight = KEEP * self._weight + weight
        self._weighted = KEEP * self._weighted + weight * (became[0] - was[0]) / more
        self._compute_s = became[0]

    def estimate(self) -> RateCostEstimate | None:
        """None before the rate was changed. Less than it was measured to be where that is not sure."""
        if not self._weight:
            return None
        weight = self._weight + 1 / (_PRIOR * self._compute_s) ** 2
        return RateCostEstimate(kept_s=max(self._weighted / weight, 0.0), error_s=1 / math.sqrt(weight))
