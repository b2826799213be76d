"""Cost of a lower sparsity to the devices: selecting, summing and applying more entries takes their time.

Workers that train on processors report the exchange's time in each step, whatever the batch is and whatever else uses
the processors. It grows with the density. A GPU has nothing to report: the exchange's processors run beside its work.
There the cost shows where the sparsity changes and the batch does not. It is the difference of a rank's compute times
before and after, over the difference of the densities. Either way a step's model needs to know nothing of sparsity: it
is always of the present one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.robust import median_error, spread

WINDOW_STEPS: Final = 16
NEEDED_STEPS: Final = 6
SKIPPED_STEPS: Final = 2
"""Steps left out after a change: blocks selected at the old rate are still under way."""
LEAST_CHANGE: Final = 0.001
"""Smallest change of the density that counts: the effect of a smaller one drowns in noise."""
KEEP: Final = 0.9
"""Weight of earlier differences at each new one."""
KEPT_LEVELS: Final = 4
"""Sparsities whose exchange is remembered, the newest."""
_TOLD_STEPS: Final = 64
"""Steps of all ranks together in a level: each rank carries the same entries."""
_LEAST_PART: Final = 0.5
"""Relative error of an estimate from one sparsity alone: it lacks the part of the choice that grows with density."""
_PRIOR: Final = 1.5
"""Standard deviation of the prior, in steps per unit of density. Its mean is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityCostEstimate:
    """Cost of density to a step.

    dense_s: seconds that a step takes longer with density 1 than with 0, in proportion between. error_s: its standard
    error."""

    dense_s: float
    error_s: float


class _Median(NamedTuple):
    """Median of some times. error: standard error, never 0 for a positive median."""

    centre: float
    error: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> _Median:
        centre = median(seconds)
        return cls(centre, max(median_error(spread(seconds, centre), len(seconds)), 0.002 * centre))


class SparsityCostEstimator:
    """Estimator of one run. Bounded: KEPT_LEVELS sparsities, two levels a rank and three sums."""

    def __init__(self) -> None:
        self._told = _ToldCost()
        self._compared = _ComparedCost()

    def observe(self, rank: int, step: ObservedStep) -> None:
        """Observe one more step of a rank; its times are finite and not negative. At sparsity 0 nothing is learned."""
        sparsity = step.strategy_metrics.get("sparsity", 0.0)
        if not 0 < sparsity < 1:
            return
        select_s, apply_s = (step.strategy_metrics.get(name, 0.0) for name in ("select_s", "apply_s"))
        if apply_s > 0:
            self._told.observe(sparsity, select_s, apply_s)
        self._compared.observe(rank, sparsity, step)

    def estimate(self) -> SparsityCostEstimate | None:
        """Return the estimate from workers' reports, else from changes of the sparsity; None before there was one."""
        return self._told.estimate() or self._compared.estimate()


class _ToldCost:
    """Estimate from the exchange's time on the training processors, in steps of all ranks."""

    def __init__(self) -> None:
        self._levels: dict[float, deque[tuple[float, float]]] = {}  # (select_s, apply_s) by sparsity, the newest last

    def observe(self, sparsity: float, select_s: float, apply_s: float) -> None:
        level = self._levels.pop(sparsity, None) or deque(maxlen=_TOLD_STEPS)
        self._levels[sparsity] = level
        level.append((select_s, apply_s))
        if len(self._levels) > KEPT_LEVELS:
            del self._levels[next(iter(self._levels))]

    def estimate(self) -> SparsityCostEstimate | None:
        """Return the estimate from medians c_i (the choice) and a_i (summing, applying) of the steps at density d_i.

        With the least density d_0 and the largest d_1:

            dense_s = sum d_i a_i / sum d_i^2  +  (c_1 - c_0) / (d_1 - d_0)

        Chosen entries alone are summed and applied. The choice reads all entries, and a part of it, encoding, is of the
        chosen ones. Only two densities separate the parts, so one density alone gives the least cost."""
        levels = sorted(
            (1 - sparsity, _Median.of(select_s), _Median.of(apply_s))
            for sparsity, level in self._levels.items()
            if len(level) >= NEEDED_STEPS
            for select_s, apply_s in [zip(*level, strict=True)]
        )
        if not levels:
            return None
        applied_s = sum(d * a.centre for d, _, a in levels) / sum(d * d for d, _, _ in levels)
        (least, c_0, _), (most, c_1, _) = levels[0], levels[-1]
        if most - least < LEAST_CHANGE:
            return SparsityCostEstimate(dense_s=applied_s, error_s=_LEAST_PART * applied_s)
        chosen_s = max((c_1.centre - c_0.centre) / (most - least), 0.0)
        error_s = math.hypot(c_0.error, c_1.error) / (most - least)
        return SparsityCostEstimate(dense_s=applied_s + chosen_s, error_s=error_s)


@dataclass(slots=True)
class _SparsityLevel:
    """Newest steps of a rank with one batch at one sparsity."""

    local_batch: int
    sparsity: float
    skipped: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def measured(self) -> _Median | None:
        """Return the median; None before enough steps."""
        return _Median.of(self.times_s) if len(self.times_s) >= NEEDED_STEPS else None


class _ComparedCost:
    """Estimate from whole steps before and after a change of the sparsity under one batch."""

    def __init__(self) -> None:
        self._now: dict[int, _SparsityLevel] = {}
        self._before: dict[int, _SparsityLevel] = {}
        self._weight = self._weighted = 0.0
        self._compute_s = 0.0

    def observe(self, rank: int, sparsity: float, step: ObservedStep) -> None:
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
        weight = more * more / (was.error**2 + became.error**2)
        self._weight = KEEP * self._weight + weight
        self._weighted = KEEP * self._weighted + weight * (became.centre - was.centre) / more
        self._compute_s = became.centre

    def estimate(self) -> SparsityCostEstimate | None:
        """Return the estimate; None before the sparsity was changed. An uncertain measurement is shrunk towards 0.

        Weighted least squares over the changes, with a prior of 0:

            dense_s = sum w_i (T'_i - T_i) / (d'_i - d_i)  /  (sum w_i + 1 / prior^2),  w_i = (d'_i - d_i)^2 / var_i
        """
        if not self._weight:
            return None
        weight = self._weight + 1 / (_PRIOR * self._compute_s) ** 2
        return SparsityCostEstimate(dense_s=max(self._weighted / weight, 0.0), error_s=1 / math.sqrt(weight))
