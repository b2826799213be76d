from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from measured_runs import EVEN, PLACES, given, measured, ranks

from atoll.controller.deciding import next as deciding
from atoll.controller.deciding.first import Place, first_plan, pinned_plan
from atoll.controller.deciding.given import Given, Policy, lead_steps
from atoll.controller.deciding.next import next_plan
from atoll.controller.estimators.profile import OverlapEstimate
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import DeviceMemory, JobPins, PlanRecord
from atoll.step_estimators.estimates import NodeEstimate, RankProfile


def holds(samples: int) -> DeviceMemory:
    return DeviceMemory(trained=1, measured=samples)


UNEQUAL = (0.001, 0.00164, 0.00263)


def test_the_reason_tells_speeds_batches_and_what_is_won() -> None:
    plan = next_plan(given(ranks(*UNEQUAL)))
    assert plan is not None
    assert plan.reason == (
        "device speeds 1.00 : 0.61 : 0.38: local batches 86/85/85 → 129/78/49, step 0.224 → 0.129 s predicted"
    )
    assert (plan.run, plan.id, plan.from_step, plan.shares) == (1, 2, 25, (129.0, 78.0, 49.0))
    assert plan.predicted_s == pytest.approx(0.129)


@pytest.mark.parametrize(("step_s", "steps"), [(0.0, 5), (0.01, 5), (0.25, 5), (0.4, 4), (0.9, 3), (1.1, 2), (60.0, 2)])
def test_a_plan_holds_once_it_is_told_and_long_steps_wait_for_no_more(step_s: float, steps: int) -> None:
    assert lead_steps(step_s) == steps


@pytest.mark.parametrize(
    "plan",
    [
        EVEN,
        next_plan(given(ranks(*UNEQUAL))),
        next_plan(given(measured((0.001, 0.02), (0.002, 0.02), (0.004, 0.02)), current=replace(EVEN, id=2))),
        first_plan(3, "auto", PLACES, {"a/0": 1, "b/0": 2, "c/0": 4}, 0),
    ],
)
def test_every_plan_can_be_derived_again_byte_for_byte(plan: PlanRecord) -> None:
    assert PLANNERS[plan.planner].run_json(plan.input) == plan.output
    planned = json.loads(plan.output)
    assert list(plan.shares) in (planned["batches"], planned.get("continuous"))


@pytest.mark.parametrize(
    "nothing_new",
    [
        given(ranks(*UNEQUAL), planned_s=98.5),  # the last plan is younger than 2 s
        given(ranks(*UNEQUAL), policy=Policy(split="even")),
        given(ranks(*UNEQUAL), policy=Policy(pins=JobPins(shares=(3.0, 2.0, 1.0)))),
        given(ranks(*UNEQUAL, batches=(1, 1, 0))),  # not a sample for each
        given(ranks(0.001, 0.00102, 0.00103)),  # less than 5 % to win
        given(dict(list(ranks(*UNEQUAL).items())[:2])),  # rank 2 is not known yet
        given(ranks(*UNEQUAL, plan=2)),  # measured under another plan
        given(ranks(0.001, 0.0012, 0.0014, error=2e-4)),  # within the noise
    ],
)
def test_no_new_plan(nothing_new: Given) -> None:
    assert next_plan(nothing_new) is None


def test_a_plan_is_not_followed_by_another_for_the_same_speeds() -> None:
    plan = next_plan(given(ranks(*UNEQUAL)))
    assert plan is not None
    batches = tuple(int(share) for share in plan.shares)
    assert next_plan(given(ranks(*UNEQUAL, plan=2, batches=batches), current=plan)) is None


def test_a_plan_that_won_nothing_is_not_followed_by_more_of_the_same() -> None:
    """With a fixed cost a step, fewer samples look slower each, and every plan would move more of them away. When a
    device really slows down later, there is a new plan all the same."""
    plan = next_plan(given(ranks(*UNEQUAL)))
    assert plan is not None
    assert plan.measured_s == pytest.approx(85 * 0.00263)
    batches = (129, 78, 49)
    fixed = ranks(*(0.2236 / batch for batch in batches), plan=2, batches=batches)
    assert next_plan(given(fixed, current=plan)) is None
    slower = ranks(0.2236 / 129, 0.2236 / 78, 0.5 / 49, plan=2, batches=batches)
    assert next_plan(given(slower, current=plan)) is not None


def test_optperf_serves_once_every_rank_was_measured_with_two_batches() -> None:
    """A fixed cost that rules rank 2: by time per sample it would get still less, though that wins nothing."""
    models = ((0.001, 0.01), (0.001, 0.01), (0.001, 0.06))
    plan = next_plan(given(measured(*models), current=replace(EVEN, id=2)))
    assert plan is not None
    assert plan.planner == "optperf"
    assert plan.shares == (102.0, 102.0, 52.0)  # all take 0.112 s
    assert plan.predicted_s == pytest.approx(0.112)
    assert "local batches 86/85/85 → 102/102/52, step 0.145 → 0.112 s predicted" in plan.reason


def test_a_user_may_keep_to_time_per_sample() -> None:
    models = ((0.001, 0.01), (0.001, 0.01), (0.001, 0.06))
    plan = next_plan(given(measured(*models), current=replace(EVEN, id=2), policy=Policy(split="inverse-time")))
    assert plan is not None
    assert plan.planner == "inverse-time"


def test_a_split_that_promises_less_than_its_doubt_is_no_plan() -> None:
    models = ((0.001, 0.01), (0.001, 0.01), (0.001, 0.06))
    current = replace(EVEN, id=2)
    assert next_plan(given(measured(*models, error=0.12), current=current)) is None
    # Doubt counts for how far a batch moves: close to the best there is less.
    near = measured(*models, batches=(97, 97, 62), error=0.04)
    assert next_plan(given(near, current=current)) is not None
    overlap = OverlapEstimate(gamma=0.2, t_o=0.01, t_u=0.002, error_s=0.02)
    assert next_plan(given(measured(*models), current=current, overlap=overlap)) is not None


def test_ranks_that_wait_for_communication_are_told() -> None:
    overlap = OverlapEstimate(gamma=0.2, t_o=0.3, t_u=0.01, error_s=0.001)
    plan = next_plan(
        given(measured((0.0005, 0.01), (0.001, 0.01), (0.004, 0.01)), current=replace(EVEN, id=2), overlap=overlap)
    )
    assert plan is not None
    assert "wait for communication" in plan.reason


def test_a_pin_keeps_the_shares_and_later_shares_keep_it() -> None:
    first = replace(EVEN, strategy_params={"sparsity": 0.99})
    adjusted = pinned_plan(first, JobPins(strategy_params={"sparsity": 0.995}), 7)
    assert adjusted is not None
    assert (adjusted.id, adjusted.from_step, adjusted.shares, adjusted.strategy_params) == (
        2,
        7,
        first.shares,
        {"sparsity": 0.995},
    )
    assert adjusted.reason == "sparsity 0.99 → 0.995 (asked by a user)"
    assert PLANNERS[adjusted.planner].run_json(adjusted.input) == adjusted.output
    assert pinned_plan(adjusted, JobPins(strategy_params={"sparsity": 0.995}), 7) is None
    plan = next_plan(given(ranks(*UNEQUAL, plan=2), current=adjusted))
    assert plan is not None
    assert (plan.id, plan.shares, plan.strategy_params) == (3, (129.0, 78.0, 49.0), {"sparsity": 0.995})


def test_a_pinned_batch_keeps_the_proportions_and_pinned_shares_replace_them() -> None:
    current = replace(EVEN, shares=(128.0, 64.0, 64.0))
    plan = pinned_plan(current, JobPins(total_batch=512, shares=()), 9)
    assert plan is not None
    assert (plan.total_batch, plan.shares) == (512, (256.0, 128.0, 128.0))
    shared = pinned_plan(plan, JobPins(total_batch=512, shares=(2.0, 1.0, 1.0)), 9)
    assert shared is not None
    assert (shared.total_batch, shared.shares, shared.reason) == (
        512, (2.0, 1.0, 1.0), "shares 50/25/25 % (asked by a user)",
    )  # fmt: skip


def test_every_rank_gets_a_sample_however_slow_it_is() -> None:
    plan = next_plan(given(ranks(0.001, 0.001, 9.0)))
    assert plan is not None
    assert min(plan.shares) == 1.0


def test_shares_are_positive_where_no_batch_is_known() -> None:
    slow = [Place("a", 0, 1.0), Place("b", 0, 0.0001)]
    assert min(first_plan(1, "auto", slow, {}, 0).shares) > 0
    assert min(first_plan(1, "auto", PLACES, {}, 2).shares) > 0


def test_a_device_that_is_new_to_the_job_is_placed_by_its_benchmark() -> None:
    """a and b trained at 1 and 2 ms a sample; c does as much work a second as b."""
    places = [Place(name, 0, 1.0, work, holds(500)) for name, work in (("a", 100.0), ("b", 50.0), ("c", 50.0))]
    known = first_plan(2, "auto", places, {"a/0": 0.001, "b/0": 0.002}, 200)
    assert (known.shares, known.reason) == (
        (100.0, 50.0, 50.0), "speeds learned in earlier runs, new devices by their benchmark: 1.00 : 0.50 : 0.50",
    )  # fmt: skip
    assert first_plan(1, "auto", places, {}, 200).reason == "the devices' benchmarks: 1.00 : 0.50 : 0.50"
    nearly = [replace(place, work_per_s=100.0 + i) for i, place in enumerate(places)]
    assert first_plan(1, "auto", nearly, {}, 200).planner == "even"


def test_a_device_of_unknown_memory_begins_with_the_even_share_or_less() -> None:
    """Speeds of 1 : 0.5 and a batch of 256: nobody knows yet whether the faster one holds 171."""
    fast, slow = Place("a", 0, 1.0, 100.0), Place("b", 0, 1.0, 50.0)
    assert first_plan(1, "auto", [fast, slow], {}, 0).shares == (1.0, 1.0)
    assert first_plan(1, "auto", [fast, slow], {}, 256).shares == (128.0, 128.0)
    bound = first_plan(2, "auto", [replace(fast, memory=holds(149)), slow], {}, 256)
    assert bound.shares == (149.0, 107.0)
    assert bound.reason == "the devices' benchmarks: 1.00 : 0.50; the memory of a/0 bounds its share"
    free = first_plan(2, "auto", [replace(fast, memory=holds(400)), slow], {}, 256)
    assert free.shares == (171.0, 85.0)


def test_an_even_split_keeps_to_what_memory_holds() -> None:
    places = [Place(name, 0, 1.0, memory=holds(most)) for name, most in (("a", 200), ("b", 40), ("c", 200))]
    plan = first_plan(1, "even", places, {}, 240)
    assert (plan.shares, plan.planner, plan.passes) == ((100.0, 40.0, 100.0), "even", 1)
    assert plan.reason == "as equal as memory allows; the memory of b/0 bounds its share"
    unknown = [replace(place, memory=None) if place.node == "a" else place for place in places]
    assert first_plan(1, "even", unknown, {}, 240).shares == (80.0, 40.0, 120.0)


def test_a_batch_that_all_together_do_not_hold_is_trained_in_several_passes() -> None:
    places = [Place("a", 0, 1.0, 1.0, memory=holds(60)), Place("b", 0, 1.0, 2.0, memory=holds(20))]
    for split in ("auto", "even"):
        plan = first_plan(1, split, places, {}, 160)
        assert (plan.shares, plan.passes) == ((120.0, 40.0), 2)
        assert plan.reason.endswith("; each part of a batch in 2 passes, as memory holds no more")
    more = first_plan(1, "auto", places, {}, 161)
    assert (more.passes, more.shares) == (3, (101.0, 60.0))
    alone = first_plan(1, "auto", places[:1], {}, 160)
    assert (alone.shares, alone.passes) == ((160.0,), 3)


@pytest.mark.parametrize("modelled", [False, True])
def test_no_split_gives_a_rank_more_than_memory_holds(modelled: bool) -> None:
    before = given(ranks(*UNEQUAL))
    if modelled:
        before = given(measured((0.001, 0.02), (0.002, 0.02), (0.004, 0.02)), current=replace(EVEN, id=2))
    free = next_plan(before)
    assert free is not None
    bound = next_plan(replace(before, max_batches=(100, 0, 0)))
    assert bound is not None
    assert bound.shares[0] == 100 < free.shares[0]
    assert sum(bound.shares) == sum(free.shares)
    assert bound.reason.endswith("; memory bounds the share of rank 0")
    assert PLANNERS[bound.planner].run_json(bound.input) == bound.output


def test_passes_become_fewer_once_memory_was_measured_to_hold_more() -> None:
    divided = replace(EVEN, passes=4)
    known = given(ranks(0.001, 0.00102, 0.00103), current=divided)
    assert next_plan(replace(known, max_batches=(400, 0, 400))) is None
    assert next_plan(replace(known, max_batches=(80, 80, 96))) is None
    plan = next_plan(replace(known, max_batches=(400, 400, 400)))
    assert plan is not None
    assert (plan.passes, sum(plan.shares)) == (1, 256)
    assert plan.reason == "4 → 1 passes of each part of a batch, as memory holds more than was known"
    assert max(plan.shares) <= 100


def test_one_worker_needs_no_plan() -> None:
    alone = first_plan(1, "auto", PLACES[:1], {}, 64)
    assert (alone.shares, alone.reason) == ((64.0,), "one worker")
    assert next_plan(given(ranks(0.1, batches=(64,)), current=alone)) is None


def test_many_ranks_are_not_all_listed() -> None:
    current = first_plan(1, "auto", [Place(f"n{i}", 0, 1.0) for i in range(100)], {}, 1000)
    many = ranks(*(0.001 * (1 + rank % 2) for rank in range(100)), batches=(10,) * 100)
    plan = next_plan(given(many, current=current))
    assert plan is not None
    assert len(plan.reason) < 250
    assert "(100 ranks)" in plan.reason


def test_any_run_is_decided_upon_without_an_error() -> None:
    odd: list[dict[str, Any]] = [{}, {"step_s": 0.0}]
    for _ in odd:
        assert next_plan(given({})) is None


@pytest.mark.parametrize("modelled", [False, True])
def test_where_the_planner_is_not_asked_it_had_nothing_to_offer(modelled: bool) -> None:
    """1. A thousand ranks are looked at every second, and asking the planner took most of that. 2. Where all ranks end
    at nearly the same moment no split is faster by as much as a plan must promise: it is not asked. 3. Asked all the
    same, it has no plan: 200 clusters, from even ones to those where one rank takes a tenth longer."""
    rng = random.Random(3)
    skipped = 0
    for _ in range(200):
        count, noise, uneven = rng.choice((2, 3, 8, 40)), rng.choice((0.0, 0.002, 0.01)), rng.uniform(0, 0.1)
        speeds = [rng.uniform(0.3, 1.0) for _ in range(count)]
        fixed_s = rng.choice((0.0, 0.02, 0.2))
        profiles = {}
        for rank, speed in enumerate(speeds):
            batch = max(1, round(200 * speed * (1 + rng.uniform(-uneven, uneven))))
            line = NodeEstimate(
                q=0.0004 / speed, s=fixed_s / 2, k=0.0006 / speed, m=fixed_s / 2, error=0.001, low_batch=1,
                high_batch=400,
            )  # fmt: skip
            compute_s = line.compute_s(batch)
            profiles[rank] = RankProfile(
                plan=1, local_batch=batch, compute_s=compute_s, compute_error_s=noise * compute_s / 4, steps=16,
                estimate=line if modelled else None,
            )  # fmt: skip
        current = replace(EVEN, shares=(1.0,) * count)
        policy = Policy(split="auto" if modelled else "inverse-time")
        asked = given(profiles, current=current, policy=policy)
        with_check = next_plan(asked)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deciding, "is_near_best", lambda *_: False)
            assert (with_check is None) == (next_plan(asked) is None)
        totals = sum(profile.local_batch for profile in profiles.values())
        lines = [profile.estimate for profile in profiles.values() if profile.estimate]
        least_s = deciding.least_step_s(lines, totals) if lines else 0.0
        skipped += bool(lines) and deciding.is_near_best(
            [profile.compute_s for profile in profiles.values()], least_s, 0.03
        )
    assert (skipped > 50) == modelled
