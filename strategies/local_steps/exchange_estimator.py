"""Estimates what the exchange costs the devices, and how far workers have drifted, from what they tell of steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.robust import median
from atoll.strategies.stale_sparse.sparsity_cost import SparsityCostEstimate, SparsityCostEstimator

WINDOW_STEPS: Final = 32
NEEDED_STEPS: Final = 8
SKIPPED_STEPS: Final = 16
"""After a change of the density: drift follows within as many steps as it is large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftEstimate:
    """drift: steps' worth of its own updates that the worker has not sent that has most of them. density: at which."""

    drift: float
    density: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeEstimate:
    """None: not known yet."""

    cost: SparsityCostEstimate | None
    drift: DriftEstimate | None


class ExchangeEstimator:
    """Of one run. Bounded: beside the cost's, a window a rank."""

    def __init__(self) -> None:
        self._cost = SparsityCostEstimator()
        self._drifts: dict[int, _Drifts] = {}
        self._sparsity = 0.0  # that was told last

    def observe(self, rank: int, step: ObservedStep) -> None:
        """One more step of a rank, its metrics finite and not negative."""
        self._cost.observe(rank, step)
        drift, sparsity = (step.strategy_metrics.get(name, 0.0) for name in ("drift", "sparsity"))
        if not drift > 0:
            return
        seen = self._drifts.get(rank)
        if seen is None or seen.sparsity != sparsity:
            seen = self._drifts[rank] = _Drifts(sparsity)
        self._sparsity = sparsity
        seen.observe(drift)

    def estimate(self) -> ExchangeEstimate:
        cost = self._cost.estimate()
        return ExchangeEstimate(cost=cost, drift=self._largest())

    def _largest(self) -> DriftEstimate | None:
        """None while a rank told of too few steps at the newest density. Ranks that left stay at an earlier one."""
        seen = [list(one.newest) for one in self._drifts.values() if one.sparsity == self._sparsity]
        if not seen or min(map(len, seen)) < NEEDED_STEPS:
            return None
        return DriftEstimate(drift=max(map(median, seen)), density=1 - self._sparsity)


class _Drifts:
    """Of one rank at one sparsity."""

    def __init__(self, sparsity: float) -> None:
        self.sparsity = sparsity
        self.newest: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._skipped = 0

    def observe(self, drift: float) -> None:
        if self._skipped < SKIPPED_STEPS:
            self._skipped += 1
        else:
            self.newest.append(drift)
