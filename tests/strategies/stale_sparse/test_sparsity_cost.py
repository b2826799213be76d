"""The cost of more entries is learned from what workers report of the exchange, and nothing else is taken for it."""

from __future__ import annotations

import random

import pytest

from atoll.step_estimators.observed import ObservedStep
from atoll.strategies.stale_sparse.sparsity_cost import NEEDED_STEPS, SparsityCostEstimator

COST_S = 0.5  # where all were kept


class Run:
    """Two ranks whose steps take 180 ms and what is kept costs."""

    def __init__(self, *, tells: bool = True) -> None:
        """tells: what the exchange takes of them, a third of it for encoding what was chosen, beside 15 ms for
        the choice itself."""
        self.estimator = SparsityCostEstimator()
        self._tells, self._random, self._step = tells, random.Random(3), 0

    def train(self, rate: float, steps: int = 20, batch: int = 64, slower: float = 1.0) -> None:
        for _ in range(steps):
            for rank in (0, 1):
                base_s = slower * (0.18 * batch / 64 + COST_S * (1 - rate))
                compute_s = base_s * self._random.lognormvariate(0, 0.03)
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
        cost_s = COST_S * density
        return {"select_s": noise * (0.015 + cost_s / 3), "apply_s": noise * cost_s * 2 / 3}


def test_nothing_is_known_of_workers_that_tell_nothing_and_of_too_few_steps() -> None:
    quiet = Run(tells=False)
    for rate in (0.99, 0.9, 0.99):
        quiet.train(rate)
    assert quiet.estimator.estimate() is None
    run = Run()
    run.train(0.99, steps=NEEDED_STEPS // 2 - 1)
    assert run.estimator.estimate() is None
    run.train(0.99, steps=1)
    assert run.estimator.estimate() is not None


def test_steps_without_a_rate_tell_nothing_of_it() -> None:
    run = Run()
    run.train(0.0)
    assert run.estimator.estimate() is None


def test_what_workers_tell_of_one_rate_is_the_least_that_it_costs() -> None:
    """1. The rate never changed. 2. What is summed and applied is of what was sent: two thirds of the cost. 3. Nobody
    can tell yet which part of the choice grows with it."""
    run = Run()
    run.train(0.99)
    assert run.estimator.estimate() == pytest.approx(COST_S * 2 / 3, rel=0.05)


def test_the_cost_is_learnt_where_one_plan_moves_rate_and_batches() -> None:
    """1. A plan moves the rate and the local batches together, and another load comes in the same moment: whole steps
    tell nothing. 2. What the exchange took of the processors depends on neither. 3. The cost is known at once."""
    run = Run()
    run.train(0.99, batch=64)
    run.train(0.97, batch=96, slower=1.7)
    assert run.estimator.estimate() == pytest.approx(COST_S, rel=0.1)


def test_what_is_remembered_is_bounded_and_the_newest() -> None:
    run = Run()
    for turn in range(40):
        run.train(0.9 + turn / 1000, steps=8)
    assert run.estimator.estimate() == pytest.approx(COST_S, rel=0.5)
