"""Estimates of how far workers have drifted, from what each tells of its steps."""

from __future__ import annotations

import pytest

from atoll.step_estimators.observed import ObservedStep
from atoll.strategies.local_steps.exchange_estimator import (
    NEEDED_STEPS,
    SKIPPED_STEPS,
    WINDOW_STEPS,
    DriftEstimate,
    ExchangeEstimator,
)

KNOWN = SKIPPED_STEPS + NEEDED_STEPS


def tell(seen: ExchangeEstimator, rank: int, count: int, drift: float, sparsity: float = 0.8) -> None:
    metrics = {"drift": drift, "sparsity": sparsity, "select_s": 0.001, "apply_s": 0.002}
    for number in range(count):
        step = ObservedStep(
            step=number, plan=1, local_batch=8, total_batch=16, step_s=0.1, compute_s=0.1, strategy_metrics=metrics
        )
        seen.observe(rank, step)


def drift_of(seen: ExchangeEstimator) -> DriftEstimate | None:
    return seen.estimate().drift


def test_the_worker_that_has_drifted_most_counts_once_all_are_known() -> None:
    seen = ExchangeEstimator()
    tell(seen, 0, KNOWN, 3.0)
    tell(seen, 1, KNOWN - 1, 9.0)
    assert drift_of(seen) is None
    tell(seen, 1, 1, 9.0)
    assert drift_of(seen) == DriftEstimate(drift=9.0, density=pytest.approx(0.2))
    assert seen.estimate().cost is not None


def test_a_new_density_is_measured_anew_when_drift_has_followed_it() -> None:
    """1. Drift is known. 2. Another density holds: of its first steps drift is still on the way. 3. A worker that left
    before tells nothing of it, and is not waited for."""
    seen = ExchangeEstimator()
    for rank in range(3):
        tell(seen, rank, KNOWN, 3.0)
    for rank in range(2):
        tell(seen, rank, SKIPPED_STEPS, 5.0, sparsity=0.9)
        tell(seen, rank, NEEDED_STEPS - 1, 7.0, sparsity=0.9)
    assert drift_of(seen) is None
    for rank in range(2):
        tell(seen, rank, 1, 7.0, sparsity=0.9)
    assert drift_of(seen) == DriftEstimate(drift=7.0, density=pytest.approx(0.1))


def test_old_steps_are_forgotten_and_steps_without_it_tell_nothing() -> None:
    seen = ExchangeEstimator()
    tell(seen, 0, KNOWN, 30.0)
    tell(seen, 0, WINDOW_STEPS, 2.0)
    tell(seen, 0, WINDOW_STEPS, 0.0)
    assert drift_of(seen) == DriftEstimate(drift=2.0, density=pytest.approx(0.2))
