from __future__ import annotations

import pytest

from drill.figures import Distribution, Noticed, effective_ratio, median_step_s, recoveries
from drill.schedule import Hit, Strike
from drill.stories import CALM, begun, evidence, trained


def test_a_distribution_tells_what_nine_of_ten_do_not_exceed() -> None:
    assert Distribution.of(range(1, 11)) == Distribution(10, 5.5, 9, 10)
    assert Distribution.of([3.0]) == Distribution(1, 3.0, 3.0, 3.0)
    assert Distribution.of([]) is None


def test_a_killed_worker_costs_until_a_step_is_done_that_never_was_done_before() -> None:
    """1. Steps 0 to 3 begin at 0 to 3 s. 2. The strike is at 3.5 s, noticed at 3.7 s. 3. Run 2 begins step 2 again at
    12 s, and with step 4, at 14 s, says that step 3 is done."""
    found = evidence(trained(1, range(4)), trained(2, range(2, 6), later_s=10))
    (one,) = recoveries(found, [Noticed(Hit(Strike.WORKER, 3.5, ("rank 1",)), 3.7)])
    assert one.detection_s == pytest.approx(0.2)
    assert one.training_s == pytest.approx(10.5)
    assert (one.steps_lost, one.interrupted) == (1, True)


def test_a_killed_leader_costs_no_run_and_the_next_step_counts() -> None:
    (one,) = recoveries(CALM, [Noticed(Hit(Strike.LEADER, 2.5, ("controller-0",)), None)])
    assert one.detection_s is None
    assert one.training_s == pytest.approx(0.5)
    assert (one.steps_lost, one.interrupted) == (0, False)


def test_strikes_that_came_together_share_their_recovery() -> None:
    found = evidence(trained(1, range(4)), trained(2, range(4, 6), later_s=10))
    hits = [Hit(Strike.WORKER, 3.5, ()), Hit(Strike.MACHINE, 5.0, ()), Hit(Strike.LEADER, 5.5, ())]
    first, second, third = recoveries(found, [Noticed(hit, None) for hit in hits])
    assert (first.training_s, second.training_s, third.training_s) == pytest.approx((10.5, 9.0, 8.5))
    assert (first.interrupted, second.interrupted, third.interrupted) == (True, True, False)


def test_a_strike_that_training_did_not_come_back_from_has_no_time() -> None:
    (one,) = recoveries(evidence(trained(1, range(4))), [Noticed(Hit(Strike.WORKER, 3.5, ()), None)])
    assert (one.training_s, one.interrupted) == (None, False)


def test_steps_done_again_and_waiting_are_no_effective_time() -> None:
    """Six steps of 1 s in 20 s; step 3 was trained twice, and nothing happened in between."""
    found = evidence(trained(1, range(4)), trained(2, range(3, 6), later_s=10), [begun(2, 0, 6, at_s=16)])
    assert median_step_s(found, 0, 20) == pytest.approx(1.0)
    assert effective_ratio(found, 0, 20) == pytest.approx(7 / 20)
    assert effective_ratio(found, 5, 5) == 0.0
