"""The cost of more entries is learned where the sparsity changes, and nothing else is taken for it."""

from __future__ import annotations

import random

import pytest

from atoll.step_estimators.observed import ObservedStep
from atoll.strategies.stale_sparse.sparsity_cost import WINDOW_STEPS, SparsityCostEstimator

COST_S = 0.5  # where all were kept


class Run:
    """Two ranks whose steps take 180 ms and what is kept costs."""

    def __init__(self, cost_s: float = COST_S, noise: float = 0.03, *, tells: bool = False) -> None:
        """tells: what the exchange takes of them, a third of it for encoding what was chosen, beside 15 ms for
        the choice itself."""
        self.estimator = SparsityCostEstimator()
        self._tells = tells
        self._cost_s, self._noise, self._random, self._step = cost_s, noise, random.Random(3), 0

    def train(self, rate: float, steps: int = WINDOW_STEPS + 4, batch: int = 64, slower: float = 1.0) -> None:
        for _ in range(steps):
            for rank in (0, 1):
                base_s = slower * (0.18 * batch / 64 + self._cost_s * (1 - rate))
                compute_s = base_s * self._random.lognormvariate(0, self._noise)
                self.estimator.observe(
                    rank,
                    ObservedStep(
                        step=self._step,
                        plan=1,
                        local_batch=batch,
                        total_batch=2 * batch,
                        step_s=compute_s,
                        compute_s=compute_s,
                        strategy_metrics={"sparsity": rate, **self._told(1 - rate)},
                    ),
                )
            self._step += 1

    def _told(self, density: float) -> dict[str, float]:
        if not self._tells:
            return {}
        noise = self._random.lognormvariate(0, 0.03)
        cost_s = self._cost_s * density
        return {"select_s": noise * (0.015 + cost_s / 3), "apply_s": noise * cost_s * 2 / 3}


def test_nothing_is_known_before_the_rate_changes() -> None:
    run = Run()
    run.train(0.99)
    assert run.estimator.estimate() is None


def test_the_cost_is_found_from_a_few_changes_of_the_rate() -> None:
    run = Run()
    for rate in (0.99, 0.9, 0.97, 0.9, 0.99):
        run.train(rate)
    found = run.estimator.estimate()
    assert found is not None
    assert found.dense_s == pytest.approx(COST_S, rel=0.25)
    assert abs(found.dense_s - COST_S) < 3 * found.error_s


def test_a_change_too_small_to_tell_is_believed_little() -> None:
    run = Run(noise=0.1)
    for rate in (0.99, 0.985, 0.99, 0.985):
        run.train(rate)
    found = run.estimator.estimate()
    assert found is not None
    assert found.dense_s < 0.5  # noise alone would say anything up to a few seconds
    assert found.error_s > 0.1


def test_batches_that_change_and_steps_without_a_rate_tell_nothing_of_it() -> None:
    run = Run()
    run.train(0.99, batch=64)
    run.train(0.9, batch=96)  # both at once: which of them it was cannot be told
    run.train(0.0, batch=96)
    assert run.estimator.estimate() is None


def test_where_more_entries_seem_to_take_less_time_they_cost_nothing() -> None:
    run = Run(cost_s=0.0)
    run.train(0.99, slower=1.1)
    run.train(0.9)
    found = run.estimator.estimate()
    assert found is not None
    assert found.dense_s == 0.0


def test_what_workers_tell_of_one_rate_is_the_least_that_it_costs() -> None:
    """1. The rate never changed. 2. What is summed and applied is of what was sent: two thirds of the cost. 3. Nobody
    can tell yet which part of the choice grows with it, and the error says so."""
    run = Run(tells=True)
    run.train(0.99)
    found = run.estimator.estimate()
    assert found is not None
    assert found.dense_s == pytest.approx(COST_S * 2 / 3, rel=0.05)
    assert abs(found.dense_s - COST_S) < 2 * found.error_s


def test_the_cost_is_learnt_where_one_plan_moves_rate_and_batches() -> None:
    """1. A plan moves the rate and the local batches together, and another load comes in the same moment: whole steps
    tell nothing. 2. What the exchange took of the processors depends on neither. 3. The cost is known at once."""
    run = Run(tells=True)
    run.train(0.99, batch=64)
    run.train(0.97, batch=96, slower=1.7)
    found = run.estimator.estimate()
    assert found is not None
    assert found.dense_s == pytest.approx(COST_S, rel=0.1)
    assert abs(found.dense_s - COST_S) < 3 * found.error_s


def test_what_is_remembered_is_bounded_and_the_newest() -> None:
    run = Run(tells=True)
    for turn in range(40):
        run.train(0.9 + turn / 1000, steps=8)
    found = run.estimator.estimate()
    assert found is not None
    assert found.dense_s == pytest.approx(COST_S, rel=0.5)
