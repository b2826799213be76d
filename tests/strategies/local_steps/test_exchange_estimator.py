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


def tell(
    seen: ExchangeEstimator, rank: int, count: int, drift: float, *, sparsity: float = 0.8, plan: int = 1, **told: float
) -> None:
    metrics = {"drift": drift, "sparsity": sparsity, "select_s": 0.001, "apply_s": 0.002, **told}
    for number in range(count):
        step = ObservedStep(
            step=number, plan=plan, local_batch=8, total_batch=16, step_s=0.1, compute_s=0.1, strategy_metrics=metrics
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


def test_an_exchange_takes_as_long_as_on_the_worker_that_waits_least_under_the_newest_plan() -> None:
    seen = ExchangeEstimator()
    for rank, round_s in enumerate((0.3, 0.25)):
        tell(seen, rank, KNOWN, 3.0, round_s=round_s)
    assert seen.estimate().round_s == 0.25
    tell(seen, 0, KNOWN, 3.0, plan=2, round_s=0.2)
    assert seen.estimate().round_s == 0.2
    tell(seen, 1, KNOWN - 1, 3.0, plan=2, round_s=0.1)
    assert seen.estimate().round_s is None
    tell(seen, 1, 1, 3.0, plan=2, round_s=0.1)
    assert seen.estimate().round_s == 0.1


def test_what_a_look_at_all_entries_takes_is_the_same_however_many_turns_there_are() -> None:
    """Of 25 M parameters, as benchmarks/scan_cost.py measured it: 34.5 ms at 20 % without turns, 7.1 with four."""
    without, four = ExchangeEstimator(), ExchangeEstimator()
    tell(without, 0, NEEDED_STEPS, 3.0, sparsity=0.8, select_s=0.0345, every=1)
    tell(four, 0, NEEDED_STEPS, 3.0, sparsity=0.95, select_s=0.0071, every=4)
    assert without.estimate().scan_s == pytest.approx(0.0161, rel=0.01)
    assert four.estimate().scan_s == pytest.approx(0.0133, rel=0.01)
