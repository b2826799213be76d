from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from atoll.controller.jobs.planning import Place, RankSpeed, adjusted_plan, first_plan, next_plan
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import PlanRecord

PLACES = [Place(name, 0, 1.0) for name in ("a", "b", "c")]
EVEN = first_plan(1, "inverse-time", PLACES, {}, 256)


def speeds(*seconds: float, plan: int = 1, batches: tuple[int, ...] = (86, 85, 85)) -> dict[int, RankSpeed]:
    return {rank: RankSpeed(s, plan, b) for rank, (s, b) in enumerate(zip(seconds, batches, strict=True))}


def propose(**changes: Any) -> PlanRecord | None:
    given: dict[str, Any] = {
        "now_s": 100.0,
        "planned_s": 0.0,
        "split": "inverse-time",
        "current": EVEN,
        "speeds": speeds(0.001, 0.00164, 0.00263),
        "total_batch": 256,
        "newest_step": 20,
        **changes,
    }
    return next_plan(**given)


def test_the_reason_tells_speeds_batches_and_what_is_won() -> None:
    plan = propose()
    assert plan is not None
    assert plan.reason == (
        "device speeds 1.00 : 0.61 : 0.38: local batches 86/85/85 → 129/78/49, step 0.224 → 0.129 s predicted"
    )
    assert (plan.run, plan.id, plan.from_step, plan.shares) == (1, 2, 25, (129.0, 78.0, 49.0))


@pytest.mark.parametrize(
    "plan", [EVEN, propose(), first_plan(3, "inverse-time", PLACES, {"a/0": 1, "b/0": 2, "c/0": 4}, 0)]
)
def test_every_plan_can_be_derived_again_byte_for_byte(plan: PlanRecord) -> None:
    assert PLANNERS[plan.planner].run_json(plan.input) == plan.output
    planned = json.loads(plan.output)
    assert list(plan.shares) in (planned["batches"], planned.get("continuous"))


@pytest.mark.parametrize(
    "changes",
    [
        {"planned_s": 98.5},  # the last plan is younger than 2 s
        {"split": "even"},
        {"total_batch": 0},
        {"total_batch": 2},  # not a sample for each
        {"speeds": speeds(0.001, 0.00102, 0.00103)},  # less than 5 % to win
        {"speeds": {0: RankSpeed(0.001, 1, 86), 1: RankSpeed(0.003, 1, 85)}},  # rank 2 is not known yet
        {"speeds": speeds(0.001, 0.003, 0.003, plan=2)},  # measured under another plan
        {"speeds": {r: replace(s, error=2e-4) for r, s in speeds(0.001, 0.0012, 0.0014).items()}},  # within the noise
    ],
)
def test_no_new_plan(changes: dict[str, Any]) -> None:
    assert propose(**changes) is None


def test_a_plan_is_not_followed_by_another_for_the_same_speeds() -> None:
    plan = propose()
    assert plan is not None
    batches = tuple(int(share) for share in plan.shares)
    again = speeds(0.001, 0.00164, 0.00263, plan=2, batches=batches)
    assert propose(current=plan, speeds=again) is None


def test_a_plan_that_won_nothing_is_not_followed_by_more_of_the_same() -> None:
    """With a fixed cost a step, fewer samples look slower each, and every plan would move more of them away. When a
    device really slows down later, there is a new plan all the same."""
    plan = propose()
    assert plan is not None
    assert plan.measured_s == pytest.approx(85 * 0.00263)
    batches = (129, 78, 49)
    fixed = speeds(*(0.2236 / batch for batch in batches), plan=2, batches=batches)
    assert propose(current=plan, speeds=fixed) is None
    slower = speeds(0.2236 / 129, 0.2236 / 78, 0.5 / 49, plan=2, batches=batches)
    assert propose(current=plan, speeds=slower) is not None


def test_an_adjusted_rate_keeps_the_shares_and_later_shares_keep_the_rate() -> None:
    first = replace(EVEN, rate=0.99)
    adjusted = adjusted_plan(first, 0.995, 7)
    assert (adjusted.id, adjusted.from_step, adjusted.shares, adjusted.rate) == (2, 7, first.shares, 0.995)
    assert adjusted.reason == "rate 99.00 -> 99.50 % (asked by a user)"
    assert PLANNERS[adjusted.planner].run_json(adjusted.input) == adjusted.output
    plan = propose(current=adjusted, speeds=speeds(0.001, 0.00164, 0.00263, plan=2))
    assert plan is not None
    assert (plan.id, plan.shares, plan.rate) == (3, (129.0, 78.0, 49.0), 0.995)


def test_every_rank_gets_a_sample_however_slow_it_is() -> None:
    plan = propose(speeds=speeds(0.001, 0.001, 9.0))
    assert plan is not None
    assert min(plan.shares) == 1.0


def test_shares_are_positive_where_no_batch_is_known() -> None:
    slow = [Place("a", 0, 1.0), Place("b", 0, 0.0001)]
    assert min(first_plan(1, "inverse-time", slow, {}, 0).shares) > 0
    assert min(first_plan(1, "inverse-time", PLACES, {}, 2).shares) > 0


def test_one_worker_needs_no_plan() -> None:
    alone = first_plan(1, "inverse-time", PLACES[:1], {}, 64)
    assert (alone.shares, alone.reason) == ((64.0,), "one worker")
    assert propose(current=replace(alone, shares=(64.0,)), speeds=speeds(0.1, batches=(64,))) is None


def test_many_ranks_are_not_all_listed() -> None:
    current = first_plan(1, "inverse-time", [Place(f"n{i}", 0, 1.0) for i in range(100)], {}, 1000)
    many = {rank: RankSpeed(0.001 * (1 + rank % 2), 1, 10) for rank in range(100)}
    plan = propose(current=current, speeds=many, total_batch=1000)
    assert plan is not None
    assert len(plan.reason) < 250
    assert "(100 ranks)" in plan.reason
