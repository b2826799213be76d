"""Whole simulations: the real estimators and deciding code on small clusters."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from atoll.controller.simulator.cluster import build
from atoll.controller.simulator.policies import POLICIES
from atoll.controller.simulator.report import Outcome, PlanLog, plain, rows
from atoll.controller.simulator.run import simulate
from atoll.controller.simulator.scenario import Scenario, check, read
from atoll.errors import BadInput, NoFeasiblePlan

FAST = {"name": "fast", "q": 0.001, "s": 0.005, "k": 0.002, "m": 0.005}
MIDDLE = {"name": "middle", "q": 0.0016, "s": 0.005, "k": 0.0034, "m": 0.005}
SLOW = {"name": "slow", "q": 0.0033, "s": 0.005, "k": 0.0067, "m": 0.005}
THREE: dict[str, Any] = {
    "entries": 25_000_000,
    "total_batch": 192,
    "devices": [FAST, MIDDLE, SLOW],
    "learning": {"samples": 30_000},
}
GRID = {
    "sparsities": [0.8, 0.9, 0.97, 0.99, 0.999],
    "batches": [16, 64, 512],
    "extra": [[0.0, 0.01, 0.1], [0.01, 0.02, 0.11], [0.03, 0.04, 0.13], [0.08, 0.1, 0.2], [0.4, 0.4, 0.5]],
}
TWO_ISLANDS: dict[str, Any] = {
    "strategy": "stale-sparse",
    "entries": 25_000_000,
    "total_batch": 128,
    "stale_sparse": {"sparsity": 0.95, "values": "float16"},
    "devices": [FAST, {**MIDDLE, "island": "b"}],
    "links": {"a": {"mbit_s": 480}, "b": {"mbit_s": 480}},
    "learning": {"samples": 60_000, "extra": GRID},
}


EXAMPLES = Path(__file__).parents[3] / "examples" / "scenarios"


def run(policy: str, scenario: dict[str, Any], seed: int = 1) -> Outcome:
    return next(simulate(build(check(Scenario, scenario, "x"), Path()), [policy], seed))


def later_median_s(outcome: Outcome, after_s: float) -> float:
    return statistics.median(point.step_s for point in outcome.points if point.now_s > after_s)


def last(outcome: Outcome) -> PlanLog:
    return outcome.plans[-1]


@pytest.mark.parametrize("scenario", [THREE, TWO_ISLANDS], ids=["dense", "stale-sparse"])
def test_the_same_scenario_and_seed_give_the_same_bytes(scenario: dict[str, Any]) -> None:
    cluster = build(check(Scenario, {**scenario, "learning": {**scenario["learning"], "samples": 4000}}, "x"), Path())
    texts = [json.dumps(list(map(plain, simulate(cluster, list(POLICIES), seed)))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_optperf_is_near_the_optimum_by_its_third_plan_and_lb_bsp_is_not() -> None:
    """Cannikin (2024), Figure 9."""
    optperf, lb_bsp = run("optperf", THREE), run("lb-bsp", THREE)
    third = optperf.plans[:3][-1]
    assert third.exact_s <= 1.05 * third.optimum_s
    fourth = lb_bsp.plans[3]
    assert fourth.exact_s > 1.2 * fourth.optimum_s
    best = lb_bsp.best_split
    assert best is not None
    assert best.record.id > 4
    assert optperf.seconds < lb_bsp.seconds < run("even", THREE).seconds


def test_predictions_are_within_7_percent_of_what_is_measured() -> None:
    for seed in range(5):
        assert 0 < max(run("optperf", THREE, seed).errors) < 0.07


def test_a_second_load_on_a_device_is_followed() -> None:
    change = {"at_s": 20, "device": "fast", "speed": 0.5}
    scenario = {**THREE, "changes": [change]}
    even, optperf = run("even", scenario), run("optperf", scenario)
    assert last(optperf).at_s > 20
    assert last(optperf).exact_s <= 1.06 * last(optperf).optimum_s
    assert later_median_s(optperf, 40) < 0.8 * later_median_s(even, 40)


def test_a_device_that_joins_and_one_that_leaves_begin_new_runs() -> None:
    late = {**FAST, "name": "late", "joins_s": 10}
    scenario = {**THREE, "devices": [FAST, {**MIDDLE, "leaves_s": 25}, SLOW, late], "restart_s": 2}
    outcome = run("optperf", scenario)
    sizes = {plan.record.run: len(plan.batches) for plan in outcome.plans}
    assert sizes == {1: 3, 2: 4, 3: 3}
    assert all(sum(plan.batches) == 192 for plan in outcome.plans)
    third = next(plan for plan in outcome.plans if plan.record.run == 3)
    assert third.record.reason == "learned in earlier runs"
    gaps = [b.now_s - a.now_s - b.step_s for a, b in zip(outcome.points, outcome.points[1:], strict=False)]
    assert [gap for gap in gaps if gap > 1e-6] == pytest.approx([2.0, 2.0])


def test_a_job_without_devices_waits_for_the_next_one() -> None:
    alone = {**THREE, "total_batch": 16, "devices": [{**FAST, "leaves_s": 5}, {**SLOW, "joins_s": 50}]}
    outcome = run("optperf", alone)
    times = [point.now_s for point in outcome.points]
    assert not [now for now in times if 6 < now < 50]
    assert outcome.reached


def test_the_last_device_that_leaves_ends_the_run() -> None:
    outcome = run("even", {**THREE, "devices": [{**FAST, "leaves_s": 5}], "max_s": 100})
    assert outcome.ended == "max_s"
    assert not outcome.reached


def test_no_plan_goes_beyond_a_devices_memory() -> None:
    tight = {**THREE, "devices": [{**FAST, "max_batch": 70}, MIDDLE, SLOW]}
    assert run("even", tight).reached
    bound = run("optperf", tight)
    assert bound.reached
    assert max(plan.batches[0] for plan in bound.plans) == 70
    assert max(plan.batches[0] for plan in run("optperf", THREE).plans) > 70


def test_a_batch_that_no_split_can_hold_is_no_feasible_plan() -> None:
    with pytest.raises(NoFeasiblePlan):
        run("even", {**THREE, "devices": [{**FAST, "max_batch": 70}]})


def test_goodput_lets_the_batch_grow_with_the_noise() -> None:
    noisy = {
        **THREE,
        "devices": [FAST, SLOW],
        "total_batch": 96,
        "overlap": {"mbit_s": 2000},
        "learning": {"samples": 60_000, "noise_scale": [500, 2000], "batches": [96, 1536]},
    }
    fixed, goodput = run("optperf", noisy), run("goodput", noisy)
    totals = [sum(plan.batches) for plan in goodput.plans]
    assert totals[-1] > 2 * totals[0]
    assert goodput.plans[-1].record.learning_rate_factor > 2
    assert goodput.seconds < 0.8 * fixed.seconds


def test_the_sparsity_follows_the_bandwidth() -> None:
    thinner = {**TWO_ISLANDS, "changes": [{"at_s": 20, "island": name, "mbit_s": 95} for name in "ab"]}
    outcome = run("parameters", {**thinner, "learning": {"samples": 60_000, "extra": GRID}})
    before = [point.params["sparsity"] for point in outcome.points if 15 < point.now_s < 20]
    after = [point.params["sparsity"] for point in outcome.points if point.now_s > 40]
    assert min(after) > max(before)
    exact_s = last(outcome).exact_s
    assert later_median_s(outcome, 40) < 1.1 * exact_s
    assert any("Mbit/s" in plan.record.reason for plan in outcome.plans)


def test_an_unknown_policy_is_refused_before_anything_runs() -> None:
    with pytest.raises(BadInput, match="no policy 'optprf'. Did you mean 'optperf'?"):
        list(simulate(build(check(Scenario, THREE, "x"), Path()), ["even", "optprf"], 1))


def test_a_row_says_what_came_of_each_policy() -> None:
    short = {**THREE, "max_steps": 100}
    cluster = build(check(Scenario, short, "x"), Path())
    table = rows(list(simulate(cluster, ["even", "optperf"], 1)))
    assert [row[0] for row in table] == ["even", "optperf"]
    assert table[0][1].endswith(": max_steps")
    shown = plain(next(simulate(cluster, ["even"], 1)))
    assert shown["steps"] == 100
    assert shown["curve"][-1]["now_s"] == shown["seconds"]
    assert shown["plans"][0]["batches"] == [64, 64, 64]


def test_a_far_slower_device_stays_a_standby_and_one_that_helps_is_taken_in() -> None:
    offers = [
        {**FAST, "name": "twentieth", "speed": 0.05, "joins_s": 20},
        {**FAST, "name": "half", "speed": 0.5, "joins_s": 40},
    ]
    scenario = {**THREE, "devices": [*THREE["devices"], *offers], "overlap": {"mbit_s": 40_000}, "admission": True}
    outcome = run("optperf", {**scenario, "learning": {"samples": 60_000}})
    assert [(verdict.device, verdict.admitted) for verdict in outcome.verdicts] == [
        ("twentieth", False),
        ("half", True),
    ]
    before = [point.step_s for point in outcome.points if 20 < point.now_s < 40]
    assert later_median_s(outcome, 70) < 0.9 * statistics.median(before)
    taken_in = [plan for plan in outcome.plans if plan.record.run == 2]
    assert len(taken_in) <= 3
    assert taken_in[-1].exact_s < 1.06 * taken_in[-1].optimum_s


def test_what_more_entries_take_of_the_devices_is_planned_with_though_batches_move_at_once() -> None:
    """1. Links carry anything, a lower sparsity would learn a little faster, and every entry sent takes of the devices'
    time. 2. The controller's first plan moves sparsity and batches together. 3. It took a sparsity whose steps were
    28 % longer than predicted, and stayed there: with both changed, whole steps told nothing of the cost. 4. Now no
    plan is far off, and following the sparsity is not slower than leaving it."""
    cluster = build(check(Scenario, read(EXAMPLES / "sparsity-cost.toml"), "scenario"), EXAMPLES)
    left, followed = (next(simulate(cluster, [policy], 1)) for policy in ("inverse-time", "parameters"))
    assert followed.seconds < left.seconds
    assert followed.plans[1].batches != followed.plans[0].batches
    assert 0 < max(followed.errors) < 0.05


@pytest.mark.parametrize(("noise_scale", "least", "most"), [(8.0, 64, 64), (4000.0, 400, 512)])
def test_the_batch_of_one_worker_follows_its_gradients_noise(noise_scale: float, least: int, most: int) -> None:
    """1. One worker may train with 64 to 512 samples a step. 2. It was given another batch once, to learn what a step
    takes, and kept that for ever: with nobody to compare gradients with, their noise was never known. 3. It compares
    two successive steps of its own: down to the least where they say so, up to near the most where they do."""
    scenario = {
        "entries": 1_000_000, "total_batch": 128, "devices": [{**FAST, "s": 0.2, "m": 0.2}],
        "learning": {
            "samples": 30_000, "initial_batch": 128, "batches": [64, 512], "noise_scale": [noise_scale, noise_scale],
        },
    }  # fmt: skip
    outcome = run("goodput", scenario)
    assert least <= sum(outcome.plans[-1].batches) <= most
