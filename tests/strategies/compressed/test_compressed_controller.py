from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from measured_runs import EVEN, given, ranks

from atoll.controller.deciding.given import Given, Policy
from atoll.controller.deciding.next import next_plan
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import PlanRecord
from atoll.strategies.compressed.controller import CompressedController
from atoll.strategies.compressed.costs.compression_costs import CostEstimator
from atoll.strategies.compressed.costs.measured import MeasuredCosts
from atoll.strategies.compressed.plan import CompressedPlan
from atoll.strategies.compressed.settings import Compressed

POLICY = Policy(half=CompressedController(Compressed(algorithm="ef-sign")), split="even", initial_batch=256)
EVERY_MS = 3.0
TENSORS = [[1, 4_000_000, int(1e3 * EVERY_MS)], [2, 4_000, 500], [1, 8_000_000, int(2e3 * EVERY_MS)]]


def told(mbit: float, **changes: Any) -> MeasuredCosts:
    cost = [2e-4, 2e-10]
    fields: dict[str, Any] = {
        "tensors": TENSORS,
        "rest_s": 0.02,
        "iteration_s": 0.5,
        "groups": 3,
        "workers": 3,
        "algorithm": "ef-sign",
        "divisible": True,
        "ratio": 1 / 32,
        "link": [5e-4, 8 / (mbit * 1e6)],
        "allreduce": [4e-4, 4 / 3 * 8 / (mbit * 1e6)],
        "compress_device": cost,
        "compress_cpu": cost,
        "decompress_device": cost,
        "decompress_cpu": cost,
    }
    return MeasuredCosts.model_validate(fields | changes)


def run(mbit: float, current: PlanRecord = EVEN, **changes: Any) -> Given:
    estimator = CostEstimator()
    for rank in range(3):
        estimator.on_message(rank, told(mbit, **changes))
    seen = ranks(0.002, 0.002, 0.002, plan=current.id)
    asked = given(seen, current=current, policy=POLICY)
    return replace(asked, profile=replace(asked.profile, of_strategy=estimator.estimate()))


def planned(asked: Given) -> PlanRecord:
    plan = next_plan(asked)
    assert plan is not None
    return plan


def test_a_thin_link_gets_compression_with_words_and_the_planner_derives_it_again() -> None:
    plan = planned(run(100))
    groups = CompressedPlan.model_validate(dict(plan.strategy_params)).as_groups()
    assert groups is not None
    assert (groups[0].begin, groups[-1].end) == (0, 4)
    assert any(group.way.compressed for group in groups)
    assert plan.reason.startswith("link 100 Mbit/s: tensor")
    assert "EF-sign" in plan.reason
    assert "ms sooner" in plan.reason
    assert plan.shares == EVEN.shares
    assert PLANNERS[plan.planner].run_json(plan.input) == plan.output


def test_a_fast_link_compresses_nothing() -> None:
    plan = planned(run(100_000))
    groups = CompressedPlan.model_validate(dict(plan.strategy_params)).as_groups()
    assert groups is not None
    assert not any(group.way.compressed for group in groups)
    assert "nothing is compressed" in plan.reason


def test_it_is_planned_anew_when_the_step_should_take_another_time_and_only_then() -> None:
    """1. The link stays: no plan. 2. It changes by 1 %: none. 3. It is a tenth: a plan that says so. 4. It is ten times
    as fast: another one, and steps are predicted shorter."""
    first = planned(run(100))
    assert next_plan(run(100, first)) is None
    assert next_plan(run(101, first)) is None
    thin = planned(run(10, first))
    assert thin.reason.startswith("link 100 → 10 Mbit/s: ")
    assert thin.predicted_s > first.predicted_s
    wide = planned(run(1000, thin))
    assert wide.predicted_s < first.predicted_s


def test_where_no_groups_are_sooner_the_record_alone_follows() -> None:
    """The same groups are best though everything takes longer: workers change nothing, and it is not asked again."""
    first = planned(run(100))
    slower = planned(run(100, first, rest_s=0.2))
    assert slower.strategy_params == first.strategy_params
    assert "groups stay, step" in slower.reason
    assert next_plan(run(100, slower, rest_s=0.2)) is None


@pytest.mark.parametrize("heard", [0, 2])
def test_nothing_is_planned_before_all_ranks_have_told(heard: int) -> None:
    estimator = CostEstimator()
    for rank in range(heard):
        estimator.on_message(rank, told(100))
    asked = given(ranks(0.002, 0.002, 0.002), policy=POLICY)
    assert next_plan(replace(asked, profile=replace(asked.profile, of_strategy=estimator.estimate()))) is None


def test_ranks_that_tell_of_different_models_get_no_plan() -> None:
    estimator = CostEstimator()
    for rank in range(3):
        estimator.on_message(rank, told(100, tensors=TENSORS[: rank + 1]))
    asked = given(ranks(0.002, 0.002, 0.002), policy=POLICY)
    assert next_plan(replace(asked, profile=replace(asked.profile, of_strategy=estimator.estimate()))) is None
