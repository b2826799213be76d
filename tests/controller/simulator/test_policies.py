"""Baselines: what LB-BSP moves."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.controller.deciding.given import Given, Policy
from atoll.controller.estimators.profile import Profile
from atoll.controller.planners.batches.water_filling import Bounds
from atoll.controller.simulator.policies import POLICIES, SimulatedPolicy
from atoll.controller.simulator.scenario import Scenario
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import RankProfile

SCENARIO = Scenario.model_construct()


def situation(times: Sequence[float], batches: Sequence[int], plan: int = 1) -> Given:
    """Return a run whose ranks were measured under plan 1."""
    ranks = {
        rank: RankProfile(plan=1, local_batch=batch, compute_s=seconds, compute_error_s=0.0, steps=9, estimate=None)
        for rank, (seconds, batch) in enumerate(zip(times, batches, strict=True))
    }
    known = Profile(plan=1, total_batch=sum(batches), entries=1, step_s=max(times), steps=9, newest_step=9, ranks=ranks)
    shares = tuple(map(float, batches))
    current = PlanRecord(run=1, id=plan, from_step=0, shares=shares, planner="even", reason="", input="", output="")
    return Given(now_s=10.0, planned_s=0.0, current=current, profile=known, policy=Policy())


def moved(
    given: Given, bounds: Sequence[Bounds] = (), policy: SimulatedPolicy = POLICIES["lb-bsp"]
) -> tuple[float, ...] | None:
    plan = policy.decide(given, bounds or (Bounds(min_batch=1),) * given.world_size, SCENARIO)
    return plan.shares if plan else None


def test_even_never_changes_its_mind() -> None:
    assert moved(situation((1.0, 9.0), (10, 10)), policy=POLICIES["even"]) is None


def test_lb_bsp_moves_five_samples_from_the_slowest_rank_to_the_fastest() -> None:
    assert moved(situation((1.0, 4.0, 2.0), (40, 40, 40))) == (45, 35, 40)


def test_lb_bsp_pairs_the_second_slowest_with_the_second_fastest() -> None:
    assert moved(situation((1.0, 4.0, 2.0, 3.0), (40, 40, 40, 40))) == (45, 35, 45, 35)


def test_lb_bsp_stops_where_both_would_take_equally_long() -> None:
    assert moved(situation((1.0, 1.1), (40, 40))) == (42, 38)
    assert moved(situation((1.0, 1.01), (40, 40))) is None


def test_lb_bsp_keeps_to_the_bounds() -> None:
    assert moved(situation((1.0, 4.0), (40, 3))) == (42, 1)
    bounds = (Bounds(min_batch=1, max_batch=42), Bounds(min_batch=1))
    assert moved(situation((1.0, 4.0), (40, 40)), bounds) == (42, 38)


def test_lb_bsp_waits_until_all_were_measured_under_the_newest_plan() -> None:
    assert moved(situation((1.0, 4.0), (40, 40), plan=2)) is None
