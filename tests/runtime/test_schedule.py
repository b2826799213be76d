from __future__ import annotations

import math
import threading

import pytest

from atoll.agent.runtime.plans import schedule
from atoll.agent.runtime.plans.planned_step import PlannedStep, planned_from_wire
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.stale_sparse.plan import StaleSparsePlan
from atoll.v1.common_pb2 import Plan

SPARSE = registry.find("stale-sparse")


def test_without_a_plan_the_split_is_even_and_its_id_is_zero() -> None:
    shares = PlanSchedule(3)
    assert (shares.newest_contiguous(), shares.plan_at(7), shares.planned_at(7).shares) == (0, 0, (1.0, 1.0, 1.0))


def test_the_first_plan_holds_from_the_start_and_may_be_sent_again() -> None:
    shares = PlanSchedule(2, PlannedStep((3, 1)))
    shares.add(1, 0, PlannedStep((3, 1)))
    assert (shares.newest_contiguous(), shares.plan_at(0), shares.planned_at(0).shares) == (1, 1, (3.0, 1.0))


def test_a_plan_holds_only_once_all_ranks_have_agreed() -> None:
    shares = PlanSchedule(2, PlannedStep((1, 1)))
    shares.add(2, 0, PlannedStep((3, 1)))
    assert shares.plan_at(100) == 1
    shares.agree(10, 2, lead=0)
    assert [shares.plan_at(step) for step in (10, 11)] == [1, 2]


def test_a_plan_waits_for_its_step_and_for_batches_that_are_cut_already() -> None:
    shares = PlanSchedule(2, PlannedStep((1, 1)))
    shares.add(2, 50, PlannedStep((2, 1)))
    shares.add(3, 0, PlannedStep((3, 1)))
    shares.agree(10, 2, lead=4)
    assert [shares.plan_at(step) for step in (15, 49, 50)] == [1, 1, 2]
    shares.agree(20, 3, lead=4)
    assert [shares.plan_at(step) for step in (24, 25, 49)] == [1, 3, 3]


def test_a_later_plan_wins_over_one_that_would_begin_after_it() -> None:
    shares = PlanSchedule(2, PlannedStep((1, 1)))
    shares.add(2, 100, PlannedStep((2, 1)))
    shares.add(3, 50, PlannedStep((3, 1)))
    shares.agree(0, 3, lead=0)
    assert [shares.plan_at(step) for step in (49, 50, 100, 1000)] == [1, 3, 3, 3]


def test_a_gap_in_the_ids_holds_back_what_follows_it() -> None:
    shares = PlanSchedule(2)
    shares.add(1, 0, PlannedStep((1, 1)))
    shares.add(3, 0, PlannedStep((3, 1)))
    assert shares.newest_contiguous() == 1
    with pytest.raises(BadInput, match="agreed on plan 3"):
        shares.agree(0, 3, lead=0)
    shares.add(2, 0, PlannedStep((2, 1)))
    assert shares.newest_contiguous() == 3


def test_agreeing_again_on_the_same_plan_changes_nothing() -> None:
    shares = PlanSchedule(2, PlannedStep((1, 1)))
    shares.add(2, 0, PlannedStep((2, 1)))
    shares.agree(3, 2, lead=0)
    shares.agree(9, 2, lead=0)
    shares.agree(9, 1, lead=0)
    assert [shares.plan_at(step) for step in (3, 4, 9)] == [1, 2, 2]


def test_ranks_that_hear_in_another_order_come_to_the_same_schedule() -> None:
    plans = [(plan, step, PlannedStep((float(plan), 1.0))) for plan, step in ((2, 5), (3, 30), (4, 20), (5, 22))]
    seen = []
    for order in (plans, plans[::-1]):
        shares = PlanSchedule(2, PlannedStep((1, 1)))
        for plan in order:
            shares.add(*plan)
        for step, plan_id in ((4, 3), (12, 5)):
            shares.agree(step, plan_id, lead=2)
        seen.append([shares.plan_at(step) for step in range(40)])
    assert seen[0] == seen[1] == [1] * 7 + [2] * 13 + [4] * 2 + [5] * 18


@pytest.mark.parametrize("bad", [(1.0,), (1.0, 0.0), (1.0, math.nan), (1.0, 2.0, 3.0)])
def test_plans_that_cannot_hold_are_refused_and_change_nothing(bad: tuple[float, ...]) -> None:
    shares = PlanSchedule(2)
    with pytest.raises(BadInput, match="plan 1"):
        shares.add(1, 0, PlannedStep(bad))
    assert shares.newest_contiguous() == 0


def test_a_plan_changes_the_total_batch_and_the_learning_rate_and_the_next_may_take_both_back() -> None:
    """A sparsity that a plan leaves out goes on as it was; a total batch left out is the script's own again."""
    plans = PlanSchedule(
        2, planned_from_wire(Plan(shares=[1, 1], strategy_params='{"sparsity":0.9}'), SPARSE), samples=100
    )
    plans.add(2, 0, planned_from_wire(Plan(shares=[2, 1], total_batch=48, learning_rate_factor=1.5), SPARSE))
    plans.agree(9, 2, lead=0)
    plans.add(3, 0, planned_from_wire(Plan(shares=[1, 1], strategy_params='{"sparsity":0.8}'), SPARSE))
    plans.agree(19, 3, lead=0)
    assert [plans.planned_at(step) for step in (9, 10, 20)] == [
        PlannedStep((1.0, 1.0), StaleSparsePlan(sparsity=0.9)),
        PlannedStep((2.0, 1.0), StaleSparsePlan(sparsity=0.9), 48, 1.5),
        PlannedStep((1.0, 1.0), StaleSparsePlan(sparsity=0.8)),
    ]
    assert plans.take_refusals() == []


@pytest.mark.parametrize(
    ("strategy", "params", "why"),
    [
        ("stale-sparse", '{"sparsity":1.0}', "plan 6: strategy_params.sparsity = 1.0 should be less than or equal to"),
        ("stale-sparse", '{"sparsity":NaN}', "plan 6: strategy_params.sparsity = nan should be a finite number"),
        ("dense", '{"sparsity":0.9}', "plan 6: strategy_params.sparsity = 0.9 is not known. Known: none"),
    ],
)
def test_parameters_that_are_not_the_strategys_are_refused(strategy: str, params: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        planned_from_wire(Plan(id=6, shares=[1, 1], strategy_params=params), registry.find(strategy))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (PlannedStep((3.0, 1.0), total_batch=1), "less than a sample for each of the 2 workers"),
        (PlannedStep((3.0, 1.0), total_batch=101), "more than the dataset's 100 samples"),
        (PlannedStep((3.0, 1.0), learning_rate_factor=-1.0), "factor of the learning rate is -1.0"),
        (PlannedStep((3.0, 1.0), learning_rate_factor=math.nan), "factor of the learning rate is nan"),
    ],
)
def test_what_the_run_cannot_train_is_refused_alike_and_holds_up_no_later_plan(bad: PlannedStep, why: str) -> None:
    """The plan counts as agreed, with what held before it; not before that, where that waits for a step of its own."""
    good = PlannedStep((2.0, 1.0), total_batch=50)
    plans = PlanSchedule(2, PlannedStep((1.0, 1.0)), samples=100)
    plans.add(2, 40, good)
    plans.add(3, 0, bad)
    plans.add(4, 60, PlannedStep((1.0, 2.0)))
    plans.agree(9, 4, lead=0)
    assert [plans.plan_at(step) for step in (39, 40, 59, 60)] == [1, 3, 3, 4]
    assert [plans.planned_at(step) for step in (39, 40, 60)] == [PlannedStep((1.0, 1.0)), good, PlannedStep((1.0, 2.0))]
    (refusal,) = plans.take_refusals()
    assert refusal.startswith("plan 3 cannot be trained: its ")
    assert why in refusal
    assert plans.take_refusals() == []


def test_a_first_plan_that_cannot_be_trained_leaves_the_scripts_own_batch() -> None:
    plans = PlanSchedule(2, PlannedStep((3.0, 1.0), total_batch=500), samples=100)
    assert (plans.newest_contiguous(), plans.plan_at(0), plans.planned_at(0)) == (1, 1, PlannedStep((1.0, 1.0)))
    assert len(plans.take_refusals()) == 1
    plans.add(2, 0, PlannedStep((3.0, 1.0), total_batch=100))
    plans.agree(0, 2, lead=0)
    assert plans.planned_at(1).total_batch == 100


def test_other_content_under_a_waiting_id_is_refused() -> None:
    shares = PlanSchedule(2)
    shares.add(1, 0, PlannedStep((1, 1)))
    shares.add(1, 0, PlannedStep((1, 1)))
    with pytest.raises(BadInput, match="twice with different content"):
        shares.add(1, 0, PlannedStep((2, 1)))


def test_a_flood_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_WAITING", 10)
    shares = PlanSchedule(1)
    for plan_id in range(2, 12):
        shares.add(plan_id, 0, PlannedStep((1,)))
    with pytest.raises(BadInput, match="10 plans already wait"):
        shares.add(12, 0, PlannedStep((1,)))


def test_long_gone_plans_are_forgotten_but_recent_steps_still_answer() -> None:
    shares = PlanSchedule(1)
    for plan_id in range(1, 5001):
        shares.add(plan_id, 0, PlannedStep((plan_id,)))
        shares.agree(plan_id, plan_id, lead=3)
    assert shares.plan_at(5000 - schedule.KEPT_STEPS) == 5000 - schedule.KEPT_STEPS - 4
    with pytest.raises(BadInput, match="step 5 is gone"):
        shares.plan_at(5)


def test_plans_arrive_from_another_thread_while_training_asks() -> None:
    shares = PlanSchedule(1)
    arrived = threading.Event()

    def link() -> None:
        for plan_id in range(1, 2001):
            shares.add(plan_id, 0, PlannedStep((plan_id,)))
        arrived.set()

    thread = threading.Thread(target=link)
    thread.start()
    step = 0
    while not (arrived.is_set() and shares.plan_at(step) == 2000):
        shares.agree(step, shares.newest_contiguous(), lead=0)
        step += 1
        assert shares.planned_at(step).shares == (max(float(shares.plan_at(step)), 1.0),)
    thread.join()
