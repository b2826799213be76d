from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput


def device(speed: float) -> dict[str, float]:
    """Of this speed: its fixed costs are longer too, as they are on a slow machine."""
    return {"q": 0.001 / speed, "s": 0.01 / speed, "k": 0.002 / speed, "m": 0.01 / speed, "min_batch": 1}


def offer(name: str, speed: float, uncertainty: float = 0.03, **more: Any) -> dict[str, Any]:
    return device(speed) | {"name": name, "uncertainty": uncertainty} | more


def run(*offers: dict[str, Any], **changes: Any) -> Any:
    data = {
        "candidates": [256],
        "nodes": [device(1), device(0.6), device(0.3)],
        "gamma": 0.2,
        "t_o": 0.05,
        "t_u": 0.02,
        "noise_scale": 1000,
        "initial_batch": 256,
        "offers": offers,
        "uncertainty": 0.02,
    }
    return json.loads(PLANNERS["admission"].run_json(json.dumps(data | changes)))


def test_a_device_of_speed_one_twentieth_is_kept_as_a_standby() -> None:
    plan = run(offer("crawler", 0.05))
    [verdict] = plan["verdicts"]
    assert not verdict["admitted"]
    assert verdict["reason"].startswith("standby: the run would take")
    assert "% longer (step" in verdict["reason"]
    assert len(plan["batches"]) == 3
    assert plan["time_to_accuracy"] == 1


def test_a_device_of_half_speed_is_admitted_and_makes_the_run_faster() -> None:
    plan = run(offer("late", 0.5))
    [verdict] = plan["verdicts"]
    assert verdict["admitted"]
    assert verdict["reason"].startswith("admitted: the run takes")
    assert plan["admitted"] == ["late"]
    assert len(plan["batches"]) == 4
    assert plan["time_to_accuracy"] == pytest.approx(1 - verdict["improvement"], rel=0.01)  # of whole batches
    assert plan["time_to_accuracy"] < 0.9


def test_a_gain_within_the_uncertainty_is_not_enough_and_the_reason_says_so() -> None:
    sure, unsure = run(offer("late", 0.5)), run(offer("late", 0.5, uncertainty=0.0), uncertainty=0.9)
    assert sure["verdicts"][0]["improvement"] == unsure["verdicts"][0]["improvement"]
    assert not unsure["verdicts"][0]["admitted"]
    assert "less time, within the uncertainty of 90.0 %" in unsure["verdicts"][0]["reason"]


def test_doubt_about_a_device_counts_by_what_it_does_to_the_run() -> None:
    """Of a device that gets a tenth of the batch, 30 % of doubt makes the run's time 3 % less sure, not 30 %."""
    [small] = run(offer("late", 0.2, uncertainty=0.3), uncertainty=0.0)["verdicts"]
    [large] = run(offer("late", 2, uncertainty=0.3), uncertainty=0.0)["verdicts"]
    assert 0 < small["needed"] < 0.05 < large["needed"] < 0.3
    assert small["admitted"]
    assert large["admitted"]


def test_devices_that_together_do_not_pay_for_the_restart_all_wait() -> None:
    cheap = run(offer("late", 0.5), offer("later", 0.5), cost=0.05)
    assert cheap["admitted"] == ["late", "later"]
    dear = run(offer("late", 0.5), offer("later", 0.5), cost=0.5)
    assert (dear["admitted"], len(dear["batches"]), dear["time_to_accuracy"]) == ([], 3, 1)
    gained = 100 * (1 - cheap["time_to_accuracy"])
    assert [verdict["reason"] for verdict in dear["verdicts"]] == [
        f"standby: with 2 devices the run would take {gained:.1f} % less time, but the restart costs 50.0 %"
    ] * 2


def test_where_batches_are_equal_a_slower_device_holds_every_step_up() -> None:
    """The best split gives a device of a fifth of the speed little to do and gains; an even one waits for it."""
    assert run(offer("slow", 0.2))["verdicts"][0]["admitted"]
    even = run(offer("slow", 0.2), split="even")
    assert not even["verdicts"][0]["admitted"]
    assert even["verdicts"][0]["improvement"] < 0
    assert even["batches"] == [86, 85, 85]
    equal = run(offer("twin", 0.3), split="even")
    assert equal["verdicts"][0]["admitted"]
    assert equal["batches"] == [64, 64, 64, 64]


def test_a_fast_device_behind_a_slow_link_is_kept_out() -> None:
    plan = run(offer("far", 1, t_o=2.0, t_u=0.5))
    assert not plan["verdicts"][0]["admitted"]


def test_a_small_batch_gains_nothing_from_a_fourth_device_where_a_large_one_does() -> None:
    """With 8 samples the fixed cost rules; where the total may grow, the same device is worth having."""
    assert not run(offer("late", 0.5), candidates=[8], initial_batch=8)["verdicts"][0]["admitted"]
    larger = run(offer("late", 0.5), candidates=[8, 64, 512], initial_batch=8)
    assert larger["verdicts"][0]["admitted"]


def test_of_several_the_fastest_is_judged_first_and_the_others_against_the_run_with_it() -> None:
    """The order in which they came decides nothing; verdicts come in that order all the same."""
    plan = run(offer("crawler", 0.05), offer("late", 0.5), offer("twin", 1))
    assert plan["admitted"] == ["twin", "late"]
    assert [verdict["name"] for verdict in plan["verdicts"]] == ["crawler", "late", "twin"]
    turned = run(offer("twin", 1), offer("late", 0.5), offer("crawler", 0.05))
    assert turned["admitted"] == plan["admitted"]
    assert turned["batches"] == plan["batches"]
    alone = run(offer("late", 0.5))["verdicts"][0]["improvement"]
    assert plan["verdicts"][1]["improvement"] < alone


def test_a_device_that_no_plan_can_hold_is_a_standby_and_the_run_goes_on() -> None:
    plan = run(offer("greedy", 1) | {"min_batch": 1000})
    assert plan["verdicts"][0]["improvement"] is None
    assert "standby: none of the 1 candidates" in plan["verdicts"][0]["reason"]
    assert sum(plan["batches"]) == 256


@pytest.mark.parametrize(
    ("offers", "message"),
    [
        ([offer("a", 1), offer("a", 1)], "offers name 'a' twice"),
        ([offer("", 1)], r"offers\[0\].name = ''"),
        ([offer("a", 1, uncertainty=-1)], r"offers\[0\].uncertainty = -1"),
        ([offer("a", 1, gpu=1)], r"unknown field 'offers\[0\].gpu'"),
        ([offer("a", 1, t_o=-1)], r"offers\[0\].t_o = -1"),
        ([], r"offers = \[\] is wrong: .* at least 1 item"),
    ],
)
def test_bad_offers_are_refused_by_name(offers: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(*offers)


def test_many_devices_join_a_large_run_in_which_none_of_them_alone_changes_a_whole_batch() -> None:
    """64 samples a node, and 63.4 with one more: the slowest still has 64."""
    nodes = [device(1)] * 100
    alone = run(offer("n0", 1), candidates=[6400], nodes=nodes, cost=0.001, uncertainty=0.001)
    assert alone["verdicts"][0]["improvement"] > 0.005
    assert alone["admitted"] == []
    many = run(*(offer(f"n{i}", 1) for i in range(20)), candidates=[6400], nodes=nodes, cost=0.01, uncertainty=0.001)
    assert len(many["admitted"]) == 20
    assert many["time_to_accuracy"] < 0.9
