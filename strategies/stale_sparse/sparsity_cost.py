"""The cost of a lower sparsity to the devices: selecting, summing and applying more entries takes time of theirs.

Learned where the sparsity changes and the batch does not: the difference of what a rank computes before and after, over
the difference of the densities. So slow drifts cancel out, and a step's model needs to know nothing of sparsity: it is
always of the present one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.robust import median, median_error, spread

WINDOW_STEPS: Final = 16
NEEDED_STEPS: Final = 6
SKIPPED_STEPS: Final = 2
"""After a change: what was selected at the old rate is still under way."""
LEAST_CHANGE: Final = 0.001
"""Of the density: what a smaller change does drowns in noise."""
KEEP: Final = 0.9
"""Weight of what was known at each new difference."""
_PRIOR: Final = 1.5
"""Standard deviation, in steps per unit of density, of what is believed before any change was seen: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityCostEstimate:
    """A step takes dense_s seconds longer with density 1 than with 0, in proportion between; error_s: its standard
    error."""

    dense_s: float
    error_s: float


@dataclass(slots=True)
class _SparsityLevel:
    """The newest steps of a rank with one batch at one sparsity."""

    local_batch: int
    sparsity: float
    skipped: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def measured(self) -> tuple[float, float] | None:
        """Median and its standard error; None before enough steps."""
        if len(self.times_s) < NEEDED_STEPS:
            return None
        centre = median(self.times_s)
        error = median_error(spread(self.times_s, centre), len(self.times_s))
        return centre, max(error, 0.002 * centre)


class SparsityCostEstimator:
    """Of one run. Bounded: two levels a rank and three sums."""

    def __init__(self) -> None:
        self._now: dict[int, _SparsityLevel] = {}
        self._before: dict[int, _SparsityLevel] = {}
        self._weight = self._weighted = 0.0
        self._compute_s = 0.0

    def observe(self, rank: int, step: ObservedStep) -> None:
        """One more step of a rank, its times finite and not negative. At sparsity 0 nothing is learned."""
        sparsity = step.strategy_metrics.get("sparsity", 0.0)
        if not 0 < sparsity < 1:
            return
        now = self._now.get(rank)
        if now is None or (now.local_batch, now.sparsity) != (step.local_batch, sparsity):
            if now is not None:
                self._before[rank] = now
            self._now[rank] = now = _SparsityLevel(step.local_batch, sparsity)
        if now.skipped < SKIPPED_STEPS:
            now.skipped += 1
            return
        now.times_s.append(step.compute_s)
        if len(now.times_s) == WINDOW_STEPS and rank in self._before:
            self._compare(self._before.pop(rank), now)

    def _compare(self, before: _SparsityLevel, now: _SparsityLevel) -> None:
        was, became, more = before.measured(), now.measured(), before.sparsity - now.sparsity
        if was is None or became is None or before.local_batch != now.local_batch or abs(more) < LEAST_CHANGE:
            return
        weight = more * more / (was[1] ** 2 + became[1] ** 2)
        self._weight = KEEP * self._weight + weight
        self._weighted = KEEP * self._weighted + weight * (became[0] - was[0]) / more
        self._compute_s = became[0]

    def estimate(self) -> SparsityCostEstimate | None:
        """None before the sparsity was changed. Less than it was measured to be where that is not sure.

        Weighted least squares over the changes, with a prior of 0:

            dense_s = sum w_i (T'_i - T_i) / (d'_i - d_i)  /  (sum w_i + 1 / prior^2),  w_i = (d'_i - d_i)^2 / var_i
        """
        if not self._weight:
            return None
        weight = self._weight + 1 / (_PRIOR * self._compute_s) ** 2
        return SparsityCostEstimate(dense_s=max(self._weighted / weight, 0.0), error_s=1 / math.sqrt(weight))
