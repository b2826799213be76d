"""AdaptDL's rule, with which benchmarks compare: every rank is taken to be the slowest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.adaptdl import ADAPTDL

from atoll.controller.deciding.given import Given, Policy
from atoll.controller.estimators.profile import NoiseEstimate, OverlapEstimate, Profile
from atoll.controller.planners.batches.water_filling import Bounds
from atoll.controller.simulator.scenario import Scenario
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import NodeEstimate, RankProfile

FAST = NodeEstimate(q=0.001, s=0.01, k=0.002, m=0.01, error=0.01, low_batch=20, high_batch=40)
SLOW = NodeEstimate(q=0.004, s=0.01, k=0.008, m=0.01, error=0.01, low_batch=20, high_batch=40)
NOISE = NoiseEstimate(noise_scale=10_000.0, error=0.1, low=10_000.0, high=10_000.0, steps=50)
OVERLAP = OverlapEstimate(gamma=0.2, t_o=0.1, t_u=0.02, error_s=0.001)


def decided(estimates: tuple[NodeEstimate | None, ...], profile: Profile) -> PlanRecord | None:
    """Return what follows 40 samples on each of two ranks; totals of 80 to 640 are allowed."""
    ranks = {
        rank: RankProfile(plan=1, local_batch=40, compute_s=0.1, compute_error_s=0.0, steps=9, estimate=estimate)
        for rank, estimate in enumerate(estimates)
    }
    current = PlanRecord(run=1, id=1, from_step=0, shares=(40.0, 40.0), planner="", reason="", input="", output="")
    policy = Policy(min_batch=80, max_batch=640, initial_batch=80)
    given = Given(now_s=10.0, planned_s=0.0, current=current, profile=replace(profile, ranks=ranks), policy=policy)
    return ADAPTDL.decide(given, (Bounds(min_batch=1),) * 2, Scenario.model_construct())


KNOWN = Profile(
    plan=1, total_batch=80, entries=1, step_s=0.5, steps=9, newest_step=9, ranks={}, noise=NOISE, overlap=OVERLAP
)


def test_it_takes_every_rank_for_the_slowest_and_splits_evenly() -> None:
    """The first rank would win from a larger part. A step takes the slowest's 0.012 s a sample and 0.02 s, and then the
    last bucket."""
    plan = decided((FAST, SLOW), KNOWN)
    assert plan is not None
    assert max(plan.shares) - min(plan.shares) <= 1
    assert sum(plan.shares) > 160
    assert plan.predicted_s == pytest.approx(max(plan.shares) * 0.012 + 0.02 + 0.02)


def test_it_tries_a_second_total_to_learn_from() -> None:
    plan = decided((None, None), KNOWN)
    assert plan is not None
    assert 100 <= sum(plan.shares) < 110


def test_it_knows_nothing_without_the_noise_scale() -> None:
    assert decided((FAST, SLOW), replace(KNOWN, noise=None)) is None
