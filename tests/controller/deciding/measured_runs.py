"""Runs as they are measured, for the deciding code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.deciding.given import Given, Policy
from atoll.controller.estimators.profile import LinkEstimate, Profile
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import NodeEstimate, RankProfile

PLACES = [Place(name, 0, 1.0) for name in ("a", "b", "c")]
EVEN = first_plan(1, "auto", PLACES, {}, 256)


def ranks(
    *seconds: float, plan: int = 1, batches: Sequence[int] = (86, 85, 85), error: float = 0.0
) -> dict[int, RankProfile]:
    """Ranks of which only seconds per sample are known, and its error."""
    return {
        rank: RankProfile(plan=plan, local_batch=b, compute_s=s * b, compute_error_s=error * b, steps=20)
        for rank, (s, b) in enumerate(zip(seconds, batches, strict=True))
    }


def measured(
    *models: tuple[float, float], plan: int = 2, batches: Sequence[int] = (86, 85, 85), error: float = 0.01
) -> dict[int, RankProfile]:
    """Ranks of which (per sample, fixed) seconds are known, a third of both in the forward pass."""
    found = {}
    for rank, ((per_sample, fixed), b) in enumerate(zip(models, batches, strict=True)):
        estimate = NodeEstimate(
            q=per_sample / 3, s=fixed / 3, k=per_sample * 2 / 3, m=fixed * 2 / 3, error=error, low_batch=1, high_batch=b
        )
        found[rank] = RankProfile(
            plan=plan, local_batch=b, compute_s=estimate.compute_s(b), compute_error_s=0.0, steps=20, estimate=estimate
        )
    return found


def given(
    measured_ranks: dict[int, RankProfile],
    *,
    current: PlanRecord = EVEN,
    policy: Policy | None = None,
    links: dict[str, float] | None = None,
    islands: tuple[str, ...] = (),
    planned_s: float = 0.0,
    **profile: Any,
) -> Given:
    """links: bits a second by island."""
    known = Profile(
        plan=current.id,
        total_batch=sum(rank.local_batch for rank in measured_ranks.values()),
        entries=25_000_000,
        step_s=max((rank.compute_s for rank in measured_ranks.values()), default=0.0),
        steps=20,
        newest_step=20,
        ranks=measured_ranks,
        links={name: LinkEstimate(bandwidth_bps=bps, error=0.02) for name, bps in (links or {}).items()},
        **profile,
    )
    return Given(
        now_s=100.0,
        planned_s=planned_s,
        current=current,
        profile=known,
        policy=policy or Policy(),
        islands=islands or ("here",) * len(current.shares),
    )
