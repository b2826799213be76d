"""Estimate the exchange's cost to the devices, its duration, and workers' drift, from what workers report of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from atoll.step_estimators.observed import ObservedStep
from atoll.strategies.stale_sparse.sparsity_cost import SparsityCostEstimate, SparsityCostEstimator

WINDOW_STEPS: Final = 32
NEEDED_STEPS: Final = 8
SKIPPED_STEPS: Final = 16
"""Steps left out after a change of the density: drift follows within as many steps as it is large."""
CODED: Final = 5.7
"""Entries that are scanned in the time to code one, in two bits (benchmarks/scan_cost.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftEstimate:
    """Largest drift of a worker.

    drift: steps' worth of its own updates that this worker has not sent. density: the density at which it was seen."""

    drift: float
    density: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeEstimate:
    """Estimates of the exchange. None: not known yet."""

    cost: SparsityCostEstimate | None
    drift: DriftEstimate | None
    scan_s: float | None = None
    """Seconds of the training processors for a look at all entries."""
    round_s: float | None = None
    """Seconds from a worker's part of a sync round to shared parameters that have all parts, under the newest plan. It
    is of the worker that waits least for the others' parts."""
    advantage: float | None = None
    """Advantage of workers' own weights on their own data, the median worker's
    (strategies/shared_params/local_fit_gap.py)."""


class ExchangeEstimator:
    """Estimator of one run. Bounded: a few windows a rank, beside the cost's estimator."""

    def __init__(self) -> None:
        self._cost = SparsityCostEstimator()
        self._drifts: dict[int, _Newest] = {}
        self._sparsity = 0.0  # last reported
        self._rounds: dict[int, _Newest] = {}
        self._plan = 0  # last reported
        self._scans: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._advantages: dict[int, float] = {}  # by rank, the newest

    def observe(self, rank: int, step: ObservedStep) -> None:
        """Observe one more step of a rank; its metrics are finite and not negative."""
        self._observe_cost(rank, step)
        self._observe_round(rank, step)
        if (advantage := step.strategy_metrics.get("advantage")) is not None:
            self._advantages[rank] = advantage
        drift, sparsity = (step.strategy_metrics.get(name, 0.0) for name in ("drift", "sparsity"))
        if not drift > 0:
            return
        seen = self._drifts.get(rank)
        if seen is None or seen.under != sparsity:
            seen = self._drifts[rank] = _Newest(sparsity)
        self._sparsity = sparsity
        seen.observe(drift)

    def _observe_cost(self, rank: int, step: ObservedStep) -> None:
        """Observe the cost of the choice as it would be without turns:

        select_s = scan_s / H (1 + CODED d),  d of what is due"""
        told = step.strategy_metrics
        density, every = 1 - told.get("sparsity", 0.0), max(told.get("every", 1.0), 1.0)
        scan_s = told.get("select_s", 0.0) * every / (1 + CODED * density * every)
        if scan_s > 0:
            self._scans.append(scan_s)
        whole = {**told, "select_s": scan_s * (1 + CODED * density)}
        self._cost.observe(rank, replace(step, strategy_metrics=whole))

    def _observe_round(self, rank: int, step: ObservedStep) -> None:
        round_s = step.strategy_metrics.get("round_s", 0.0)
        if not round_s > 0 or step.plan < self._plan:
            return
        seen = self._rounds.get(rank)
        if seen is None or seen.under != step.plan:
            seen = self._rounds[rank] = _Newest(step.plan)
        self._plan = step.plan
        seen.observe(round_s)

    def estimate(self) -> ExchangeEstimate:
        cost = self._cost.estimate()
        rounds = _medians(self._rounds, self._plan)
        return ExchangeEstimate(
            cost=cost,
            drift=self._largest(),
            scan_s=median(list(self._scans)) if len(self._scans) >= NEEDED_STEPS else None,
            round_s=min(rounds) if rounds else None,
            advantage=median(list(self._advantages.values())) if self._advantages else None,
        )

    def _largest(self) -> DriftEstimate | None:
        drifts = _medians(self._drifts, self._sparsity)
        return DriftEstimate(drift=max(drifts), density=1 - self._sparsity) if drifts else None


def _medians(of_ranks: Mapping[int, _Newest], under: float) -> list[float]:
    """Return the ranks' medians under this value; empty while a rank reported too few steps.

    Ranks that left stay under an earlier value."""
    seen = [list(one.newest) for one in of_ranks.values() if one.under == under]
    return list(map(median, seen)) if seen and min(map(len, seen)) >= NEEDED_STEPS else []


class _Newest:
    """Newest values of one rank under one sparsity, or plan."""

    def __init__(self, under: float) -> None:
        self.under = under
        self.newest: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._skipped = 0

    def observe(self, value: float) -> None:
        if self._skipped < SKIPPED_STEPS:
            self._skipped += 1
        else:
            self.newest.append(value)
