from __future__ import annotations

import math
import threading

import pytest

from atoll.agent.runtime import schedule
from atoll.agent.runtime.schedule import ShareSchedule
from atoll.errors import BadInput


def test_without_a_plan_the_split_is_even_and_its_id_is_zero() -> None:
    shares = ShareSchedule(3)
    assert (shares.newest_contiguous(), shares.plan_at(7), shares.shares_at(7)) == (0, 0, (1.0, 1.0, 1.0))


def test_the_first_plan_holds_from_the_start_and_may_be_sent_again() -> None:
    shares = ShareSchedule(2, [3, 1])
    shares.add(1, 0, [3, 1])
    assert (shares.newest_contiguous(), shares.plan_at(0), shares.shares_at(0)) == (1, 1, (3.0, 1.0))


def test_a_plan_holds_only_once_all_ranks_have_agreed() -> None:
    shares = ShareSchedule(2, [1, 1])
    shares.add(2, 0, [3, 1])
    assert shares.plan_at(100) == 1
    shares.agree(10, 2, lead=0)
    assert [shares.plan_at(step) for step in (10, 11)] == [1, 2]


def test_a_plan_waits_for_its_step_and_for_batches_that_are_cut_already() -> None:
    shares = ShareSchedule(2, [1, 1])
    shares.add(2, 50, [2, 1])
    shares.add(3, 0, [3, 1])
    shares.agree(10, 2, lead=4)
    assert [shares.plan_at(step) for step in (15, 49, 50)] == [1, 1, 2]
    shares.agree(20, 3, lead=4)
    assert [shares.plan_at(step) for step in (24, 25, 49)] == [1, 3, 3]


def test_a_later_plan_wins_over_one_that_would_begin_after_it() -> None:
    shares = ShareSchedule(2, [1, 1])
    shares.add(2, 100, [2, 1])
    shares.add(3, 50, [3, 1])
    shares.agree(0, 3, lead=0)
    assert [shares.plan_at(step) for step in (49, 50, 100, 1000)] == [1, 3, 3, 3]


def test_a_gap_in_the_ids_holds_back_what_follows_it() -> None:
    shares = ShareSchedule(2)
    shares.add(1, 0, [1, 1])
    shares.add(3, 0, [3, 1])
    assert shares.newest_contiguous() == 1
    with pytest.raises(BadInput, match="agreed on plan 3"):
        shares.agree(0, 3, lead=0)
    shares.add(2, 0, [2, 1])
    assert shares.newest_contiguous() == 3


def test_agreeing_again_on_the_same_plan_changes_nothing() -> None:
    shares = ShareSchedule(2, [1, 1])
    shares.add(2, 0, [2, 1])
    shares.agree(3, 2, lead=0)
    shares.agree(9, 2, lead=0)
    shares.agree(9, 1, lead=0)
    assert [shares.plan_at(step) for step in (3, 4, 9)] == [1, 2, 2]


def test_ranks_that_hear_in_another_order_come_to_the_same_schedule() -> None:
    plans = [(2, 5, [2.0, 1.0]), (3, 30, [3.0, 1.0]), (4, 20, [4.0, 1.0]), (5, 22, [5.0, 1.0])]
    seen = []
    for order in (plans, plans[::-1]):
        shares = ShareSchedule(2, [1, 1])
        for plan in order:
            shares.add(*plan)
        for step, plan_id in ((4, 3), (12, 5)):
            shares.agree(step, plan_id, lead=2)
        seen.append([shares.plan_at(step) for step in range(40)])
    assert seen[0] == seen[1] == [1] * 7 + [2] * 13 + [4] * 2 + [5] * 18


@pytest.mark.parametrize("bad", [[1.0], [1.0, 0.0], [1.0, math.nan], [1.0, 2.0, 3.0]])
def test_plans_that_cannot_hold_are_refused_and_change_nothing(bad: list[float]) -> None:
    shares = ShareSchedule(2)
    with pytest.raises(BadInput, match="plan 1"):
        shares.add(1, 0, bad)
    assert shares.newest_contiguous() == 0


def test_other_content_under_a_waiting_id_is_refused() -> None:
    shares = ShareSchedule(2)
    shares.add(1, 0, [1, 1])
    shares.add(1, 0, [1, 1])
    with pytest.raises(BadInput, match="twice with different content"):
        shares.add(1, 0, [2, 1])


def test_a_flood_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_WAITING", 10)
    shares = ShareSchedule(1)
    for plan_id in range(2, 12):
        shares.add(plan_id, 0, [1])
    with pytest.raises(BadInput, match="10 plans already wait"):
        shares.add(12, 0, [1])


def test_long_gone_plans_are_forgotten_but_recent_steps_still_answer() -> None:
    shares = ShareSchedule(1)
    for plan_id in range(1, 5001):
        shares.add(plan_id, 0, [plan_id])
        shares.agree(plan_id, plan_id, lead=3)
    assert shares.plan_at(5000 - schedule.KEPT_STEPS) == 5000 - schedule.KEPT_STEPS - 4
    with pytest.raises(BadInput, match="step 5 is gone"):
        shares.plan_at(5)


def test_plans_arrive_from_another_thread_while_training_asks() -> None:
    shares = ShareSchedule(1)
    arrived = threading.Event()

    def link() -> None:
        for plan_id in range(1, 2001):
            shares.add(plan_id, 0, [plan_id])
        arrived.set()

    thread = threading.Thread(target=link)
    thread.start()
    step = 0
    while not (arrived.is_set() and shares.plan_at(step) == 2000):
        shares.agree(step, shares.newest_contiguous(), lead=0)
        step += 1
        assert shares.shares_at(step) == (max(float(shares.plan_at(step)), 1.0),)
    thread.join()
