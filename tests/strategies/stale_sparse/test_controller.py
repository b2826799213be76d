from __future__ import annotations

import json
from dataclasses import replace

import pytest
from measured_runs import EVEN, given, measured, ranks

from atoll.controller.deciding.given import Given, Policy
from atoll.controller.deciding.next import next_plan
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.controller.state.records import JobPins
from atoll.errors import NoFeasiblePlan
from atoll.step_estimators.estimates import BatchPoint
from atoll.strategies.stale_sparse.controller import StaleSparseController
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.stale_sparse.sparsity_cost import SparsityCostEstimate

SITES = ("paris", "paris", "lyon")
HALF = StaleSparseController(StaleSparse(sparsity=0.99, values="float16"))
FOLLOWING = Policy(half=HALF, adapts=("sparsity",), initial_batch=256)
CURRENT = replace(EVEN, strategy_params={"sparsity": 0.97})
LIKE = (0.002, 0.002, 0.002)
PROFILE = Surrogate(
    sparsities=(0.9, 0.99, 0.999), batches=(64.0, 256.0, 1024.0), extra=((0.0, 0.01, 0.05),) * 2 + ((0.1, 0.12, 0.2),)
)


def run(mbit: float, current: object = CURRENT, policy: Policy = FOLLOWING, **changes: object) -> Given:
    links = {"paris": mbit * 1e6, "lyon": mbit * 1e6}
    seen = changes.pop("ranks", ranks(*LIKE))
    return given(seen, current=current, policy=policy, links=links, islands=SITES, **changes)  # type: ignore[arg-type]


def test_a_thinner_link_raises_the_rate_at_once_and_says_why() -> None:
    wide = next_plan(run(480, current=replace(CURRENT, strategy_params={"sparsity": 0.9999})))
    assert wide is not None
    seen = ranks(*LIKE, plan=wide.id)
    thin = next_plan(run(20, current=wide, ranks=seen))
    assert thin is not None
    assert thin.strategy_params["sparsity"] > wide.strategy_params["sparsity"]
    before, after = (100 * plan.strategy_params["sparsity"] for plan in (wide, thin))
    assert thin.reason.startswith(f"bandwidth 480 → 20 Mbit/s: sparsity {before:.2f} → {after:.2f} %")
    assert "batch 256," in thin.reason
    assert PLANNERS["tta"].run_json(thin.input) == thin.output
    assert thin.total_batch == 0  # the script's own stays
    assert sum(thin.shares) == 256


def test_a_wider_link_lowers_the_rate_and_then_nothing_changes() -> None:
    """1. The link carries more: the sparsity falls. 2. It carries four times as much: all that could be won is below
    what any plan must promise, so the workers are not made to carry four times the entries for it."""
    tight = replace(CURRENT, strategy_params={"sparsity": 0.9999})
    plan = next_plan(run(20, current=tight))
    assert plan is not None
    assert plan.strategy_params["sparsity"] < 0.9999
    seen = ranks(*LIKE, plan=plan.id)
    assert next_plan(run(20, current=plan, ranks=seen)) is None
    assert next_plan(run(80, current=plan, ranks=seen)) is None


@pytest.mark.parametrize(
    "quiet",
    [
        run(20, policy=replace(FOLLOWING, adapts=())),
        run(20, policy=replace(FOLLOWING, pins=JobPins(strategy_params={"sparsity": 0.97}))),
        given(ranks(*LIKE), current=CURRENT, policy=FOLLOWING, islands=SITES),  # nothing is known of the links
    ],
)
def test_the_rate_stays(quiet: Given) -> None:
    assert next_plan(quiet) is None


def test_links_too_thin_for_any_rate_are_said_unless_a_split_helps() -> None:
    with pytest.raises(NoFeasiblePlan, match="even the largest profiled sparsity"):
        next_plan(run(0.001))
    plan = next_plan(run(0.001, ranks=ranks(0.002, 0.004, 0.004)))
    assert plan is not None
    assert (plan.planner, plan.strategy_params) == ("inverse-time", CURRENT.strategy_params)


def test_unequal_devices_get_their_split_with_the_rate() -> None:
    plan = next_plan(run(100, ranks=ranks(0.002, 0.004, 0.004)))
    assert plan is not None
    assert plan.shares == (128.0, 64.0, 64.0)
    even = next_plan(
        run(
            100,
            current=replace(CURRENT, strategy_params={"sparsity": 0.9999}),
            policy=replace(FOLLOWING, split="even"),
            ranks=ranks(0.002, 0.004, 0.004),
        )
    )
    assert even is not None
    assert even.shares == (86.0, 85.0, 85.0)


def test_no_split_or_batch_exceeds_what_memory_holds() -> None:
    speeds = (0.001, 0.002, 0.002)
    free = next_plan(run(60, ranks=ranks(*speeds)))
    bound = next_plan(replace(run(60, ranks=ranks(*speeds)), max_batches=(100, 0, 0)))
    assert free is not None
    assert bound is not None
    assert bound.shares[0] <= 100 < free.shares[0]
    grows = replace(FOLLOWING, surrogate=PROFILE, min_batch=64, max_batch=1024)
    found = next_plan(
        replace(run(200, policy=grows, ranks=measured(*((0.001, 0.05),) * 3, plan=1)), max_batches=(90,) * 3)
    )
    assert found is None or max(found.shares) <= 90


def test_with_an_offline_profile_the_batch_follows_too() -> None:
    """On a thin link a larger batch makes steps longer, and each carries more."""
    policy = replace(FOLLOWING, min_batch=64, max_batch=1024, surrogate=PROFILE)
    plan = next_plan(run(5, policy=policy, ranks=measured(*(((0.0004, 0.05),) * 3), plan=1)))
    assert plan is not None
    assert 256 < plan.total_batch <= 512
    assert plan.learning_rate_factor == pytest.approx((plan.total_batch / 256) ** 0.5)
    assert f"batch 256 → {plan.total_batch}" in plan.reason


def test_a_pinned_rate_leaves_the_batch_to_the_plan() -> None:
    policy = replace(
        FOLLOWING, min_batch=64, max_batch=1024, surrogate=PROFILE, pins=JobPins(strategy_params={"sparsity": 0.97})
    )
    plan = next_plan(run(1000, policy=policy, ranks=measured(*(((0.0004, 0.05),) * 3), plan=1)))
    assert plan is not None
    assert plan.strategy_params["sparsity"] == 0.97
    assert plan.total_batch > 256


def test_without_a_profile_the_rate_the_user_gave_is_the_lowest() -> None:
    """1. The user gives 0.99, and links carry anything. 2. Nobody measured what a lower one is worth to this model; it
    would cost every worker time. 3. It stays, and after a thin link it comes back to 0.99, not below."""
    there = replace(CURRENT, strategy_params={"sparsity": 0.99})
    assert next_plan(given(ranks(*LIKE), current=there, policy=FOLLOWING)) is None
    assert next_plan(run(100_000, current=there)) is None
    back = next_plan(run(100_000, current=replace(CURRENT, strategy_params={"sparsity": 0.9999})))
    assert back is not None
    assert back.strategy_params["sparsity"] == pytest.approx(0.99)


def test_a_low_rate_rises_where_entries_are_known_to_cost_the_workers() -> None:
    """1. The user gives 0.9, the links carry it, and workers tell what all entries would take of a step: three times
    what it takes. 2. At 0.97 it is a fifth shorter: the sparsity rises, though links do not ask for it."""
    low = replace(FOLLOWING, half=StaleSparseController(StaleSparse(sparsity=0.9)))
    there = replace(CURRENT, strategy_params={"sparsity": 0.9})
    assert next_plan(run(100_000, current=there, policy=low)) is None
    cost = SparsityCostEstimate(dense_s=0.5, error_s=0.1)
    plan = next_plan(run(100_000, current=there, policy=low, of_strategy=cost))
    assert plan is not None
    assert 0.95 < plan.strategy_params["sparsity"] < 0.999
    assert json.loads(plan.input)["sparsity_cost"] == {"seconds": 0.5, "sparsity": 0.9}


def test_a_device_with_a_knee_is_planned_with_its_knee() -> None:
    """1. Three batches of the last rank follow a knee at 120 samples and no line. 2. The planner is given that."""
    known = measured((0.002, 0.01), (0.002, 0.01), (0.0006, 0.06), plan=1)
    knee = tuple(BatchPoint(b, max(b, 120) / 1200, 0.01) for b in (40, 85, 240))
    known[2] = replace(known[2], points=knee, compute_s=0.1)
    plan = next_plan(run(480, current=replace(CURRENT, strategy_params={"sparsity": 0.999}), ranks=known))
    assert plan is not None
    device = json.loads(plan.input)["devices"][2]
    assert (device["alpha"], device["beta"]) == pytest.approx((120, 1200))
    assert PLANNERS["tta"].run_json(plan.input) == plan.output
    assert json.loads(plan.output)["batches"][2] > 120  # all that costs nothing, and more
