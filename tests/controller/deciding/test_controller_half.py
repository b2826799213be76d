"""The seam to the controller half of a strategy, with one that no strategy has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from measured_runs import given, ranks

from atoll.controller.deciding.given import Given, Policy, controller_half
from atoll.controller.deciding.next import next_plan
from atoll.controller.estimators.run import RunEstimators
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import RankProfile
from atoll.step_estimators.observed import ObservedStep
from atoll.strategies import registry


class Counting:
    def __init__(self) -> None:
        self._steps = 0

    def observe(self, rank: int, step: ObservedStep) -> None:
        self._steps += 1

    def estimate(self) -> int:
        return self._steps


@dataclass
class ToyHalf:
    """Changes its parameter `period` where it may."""

    def estimator(self) -> Counting:
        return Counting()

    def next_plan(self, given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
        if not given.policy.may_change("period"):
            return None
        return replace(given.current, id=given.current.id + 1, strategy_params={"period": 8}, reason="toy")


def test_a_half_is_asked_first_and_the_split_is_left_to_the_core_where_it_has_nothing() -> None:
    unequal = given(ranks(0.001, 0.002, 0.004), policy=Policy(half=ToyHalf(), adapts=("period",)))
    plan = next_plan(unequal)
    assert plan is not None
    assert plan.strategy_params == {"period": 8}
    split = next_plan(replace(unequal, policy=Policy(half=ToyHalf())))
    assert split is not None
    assert (split.planner, split.strategy_params) == ("inverse-time", {})


def test_what_a_strategys_estimator_learns_is_in_the_profile() -> None:
    run = RunEstimators(ToyHalf().estimator())
    for step in range(7):  # the first two of a run are left out
        run.observe(0, ObservedStep(step=step, plan=1, local_batch=8, total_batch=8, step_s=0.2, compute_s=0.1))
    assert run.profile().of_strategy == 5
    assert RunEstimators().profile().of_strategy is None


def test_a_strategy_that_names_no_half_has_none() -> None:
    for strategy in registry.strategies().values():
        half = controller_half(strategy.name, strategy.settings().said())
        assert (half is None) is (not strategy.controller)
