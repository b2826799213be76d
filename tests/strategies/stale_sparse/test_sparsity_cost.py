"""The cost of more entries is learned where the sparsity changes, and nothing else is taken for it."""

from __future__ import annotations

import random

import pytest

from atoll.step_estimators.observed import ObservedStep
from atoll.strategies.stale_sparse.sparsity_cost import WINDOW_STEPS, SparsityCostEstimator

COST_S = 0.5  # where all were kept


class Run:
    """Two ranks whose steps take 180 ms and what is kept costs."""

    def __init__(self, cost_s: float = COST_S, noise: float = 0.03) -> None:
        self.estimator = SparsityCostEstimator()
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
                        strategy_metrics={"sparsity": rate},
                    ),
                )
            self._step += 1


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
