"""Decides when a run gets a new plan, and which. The planner's input and output are recorded with every plan."""

from __future__ import annotations

from atoll.controller.deciding.batch import explore_batch, next_batch
from atoll.controller.deciding.given import MIN_INTERVAL_S, Given
from atoll.controller.deciding.split import next_split
from atoll.controller.state.records import PlanRecord
from atoll.errors import NoFeasiblePlan
from atoll.step_estimators.estimates import RankProfile


def next_plan(given: Given) -> PlanRecord | None:
    """Return the plan after the present one, or None while that is good enough or too little is known.

    A plan must promise more than its uncertainty. Switching plans costs nothing, since training does not pause. Raises
    NoFeasiblePlan if the strategy's planner has no plan and the split stays too."""
    if given.now_s < given.planned_s + MIN_INTERVAL_S:
        return None
    ranks = given.ranks()
    if ranks is None:
        return None
    policy = given.policy
    if policy.half is not None:
        try:
            return policy.half.next_plan(given, ranks) or _split(given, ranks)
        except NoFeasiblePlan:
            if (split := _split(given, ranks)) is not None:
                return split
            raise
    if policy.adapts_batch:
        estimates = [rank.estimate for rank in ranks if rank.estimate is not None]
        noise = given.profile.noise
        if len(estimates) < len(ranks):
            return _split(given, ranks) or explore_batch(given, ranks)
        if noise is not None and policy.initial_batch:
            return next_batch(given, ranks, estimates, noise) or _split(given, ranks)
    return _split(given, ranks)


def _split(given: Given, ranks: list[RankProfile]) -> PlanRecord | None:
    if given.policy.fixed_split or len(ranks) < 2:
        return None
    return next_split(given, ranks)
