"""Baselines: LB-BSP and AdaptDL."""

from __future__ import annotations

from typing import Any

from atoll.controller.estimators.profile import NoiseEstimate, OverlapEstimate, Profile
from atoll.controller.planners.batches.bounds import Bounds
from atoll.controller.simulator.adaptdl import AdaptDl
from atoll.controller.simulator.policies import Choice, Even, LbBsp, Situation
from atoll.step_estimators.estimates import NodeEstimate, RankProfile


def situation(
    times: tuple[float, ...],
    batches: tuple[int, ...],
    *,
    estimates: tuple[NodeEstimate, ...] = (),
    bounds: tuple[Bounds, ...] = (),
    candidates: tuple[int, ...] = (),
    plan: int = 1,
    **profile: Any,
) -> Situation:
    """Ranks that were measured under plan 1."""
    ranks = {
        rank: RankProfile(
            plan=1,
            local_batch=batch,
            compute_s=seconds,
            compute_error_s=0.0,
            steps=9,
            estimate=estimates[rank] if estimates else None,
        )
        for rank, (seconds, batch) in enumerate(zip(times, batches, strict=True))
    }
    known = Profile(
        plan=1, total_batch=sum(batches), entries=1, step_s=max(times), steps=9, newest_step=9, ranks=ranks, **profile
    )
    return Situation(
        now_s=10.0,
        planned_s=0.0,
        run=1,
        plan=plan,
        current=Choice(batches=batches, params={}, planner="even", reason=""),
        profile=known,
        bounds=bounds or (Bounds(min_batch=1),) * len(batches),
        islands=("a",) * len(batches),
        initial_batch=sum(batches),
        candidates=candidates or (sum(batches),),
        rule="adascale",
        surrogate=None,
    )


def moved(given: Situation) -> tuple[int, ...] | None:
    choice = LbBsp().decide(given)
    return choice.batches if choice else None


def test_even_never_changes_its_mind() -> None:
    assert Even().decide(situation((1.0, 9.0), (10, 10))) is None


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
    assert moved(situation((1.0, 4.0), (40, 40), bounds=bounds)) == (42, 38)


def test_lb_bsp_waits_until_all_were_measured_under_the_newest_plan() -> None:
    assert moved(situation((1.0, 4.0), (40, 40), plan=2)) is None


FAST = NodeEstimate(q=0.001, s=0.01, k=0.002, m=0.01, error=0.01, low_batch=20, high_batch=40)
SLOW = NodeEstimate(q=0.004, s=0.01, k=0.008, m=0.01, error=0.01, low_batch=20, high_batch=40)
NOISE = NoiseEstimate(noise_scale=10_000.0, error=0.1, low=10_000.0, high=10_000.0, steps=50)
OVERLAP = OverlapEstimate(gamma=0.2, t_o=0.1, t_u=0.02, error_s=0.001)
TOTALS = (80, 120, 160, 320, 640)


def test_adaptdl_takes_every_rank_for_the_slowest_and_splits_evenly() -> None:
    given = situation((0.14, 0.5), (40, 40), estimates=(FAST, SLOW), candidates=TOTALS, noise=NOISE, overlap=OVERLAP)
    choice = AdaptDl().decide(given)
    assert choice is not None
    assert choice.batches == (160, 160)
    # Computing rules: 0.012 s a sample and 0.02 s, and the last bucket.
    assert abs(choice.predicted_s - (160 * 0.012 + 0.02 + 0.02)) < 1e-9


def test_adaptdl_tries_a_second_total_to_learn_from() -> None:
    choice = AdaptDl().decide(situation((0.14, 0.5), (40, 40), candidates=TOTALS, noise=NOISE))
    assert choice is not None
    assert choice.batches == (60, 60)


def test_adaptdl_knows_nothing_without_the_noise_scale() -> None:
    assert AdaptDl().decide(situation((0.14, 0.5), (40, 40), candidates=TOTALS)) is None
