"""Decides when a run gets a new plan, and which. The planner's input and output are recorded with every plan.

A fixed total batch is split by Eq. 8 until every rank was measured with two batches, then by OptPerf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from atoll.controller.deciding.batch import explore_batch, next_batch
from atoll.controller.deciding.cost_model import (
    NO_OVERLAP,
    change_uncertainty_s,
    expected_step_s,
    is_near_best,
    least_step_s,
    predicted_step_s,
    rank_times,
)
from atoll.controller.deciding.first import by_time, least_batch
from atoll.controller.deciding.given import MIN_GAIN, MIN_INTERVAL_S, Given, plan_after
from atoll.controller.deciding.words import listed, ratios
from atoll.controller.estimators.profile import node_model
from atoll.controller.planners.batches.optperf import NodeModel, OptPerfInput
from atoll.controller.planners.registry import OPTPERF
from atoll.controller.state.records import PlanRecord
from atoll.errors import NoFeasiblePlan
from atoll.step_estimators.estimates import NodeEstimate, RankProfile

NEARER_CHANGES: Final = (1.2, 1.1)
"""Largest factors by which batches change if the best split is too far to be sure of. A rank's time is less uncertain
the less its batch changes, and steps with the nearer split teach more about it."""
MIN_SPLIT_GAIN: Final = 0.03
"""MIN_GAIN where the step's model is known: its plans do not lead away from the best split."""


def next_plan(given: Given) -> PlanRecord | None:
    """Return the plan after the present one, or None while that is good enough or too little is known.

    A plan must promise more than its uncertainty. Switching plans costs nothing, since training does not pause. Raises
    NoFeasiblePlan if the strategy's planner has no plan and the split stays too."""
    if given.now_s < given.planned_s + MIN_INTERVAL_S:
        return None
    ranks = given.ranks()
    if ranks is None:
        return None
    if (fewer := _in_fewer_passes(given, ranks)) is not None:
        return fewer
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


def _in_fewer_passes(given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
    """Return the plan with fewer passes of a batch, if memory was measured to hold more in each; else None."""
    passes, total = given.current.passes, sum(rank.local_batch for rank in ranks)
    if passes == 1 or not all(given.bounds) or given.policy.pins.shares or total < len(ranks):
        return None
    enough = math.ceil(total * passes / sum(given.bounds))
    if enough >= passes or any(rank.local_batch == 0 for rank in ranks):
        return None
    bounds = [enough * most // passes for most in given.bounds]
    times = [rank.compute_s / rank.local_batch for rank in ranks]
    decision = by_time([max(times)] * len(times) if given.policy.fixed_split else times, total, bounds)
    return plan_after(
        given,
        decision,
        shares=tuple(map(float, decision.plan.batches)),
        passes=enough,
        reason=f"{passes} → {enough} passes of each part of a batch, as memory holds more than was known",
        measured_s=max(rank.compute_s for rank in ranks),
        predicted_s=0.0,
    )


def _split(given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
    """Return the plan with a better split, None while the present one is good enough."""
    if given.policy.fixed_split or len(ranks) < 2:
        return None
    estimates = [rank.estimate for rank in ranks if rank.estimate is not None]
    if len(estimates) < len(ranks) or given.policy.split == "inverse-time":
        return _by_inverse_time(given, ranks)
    return _by_optperf(given, ranks, estimates)


def _by_inverse_time(given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
    total = sum(rank.local_batch for rank in ranks)
    if total < len(ranks) or any(rank.local_batch == 0 for rank in ranks):
        return None
    times = [rank.compute_s / rank.local_batch for rank in ranks]
    if is_near_best([rank.compute_s for rank in ranks], total / sum(1 / time for time in times), MIN_GAIN):
        return None
    decision = by_time(times, total, given.bounds)
    batches = decision.plan.batches
    before = [rank.local_batch for rank in ranks]
    old_s = expected_step_s(ranks, [rank.compute_s for rank in ranks])
    new_s = expected_step_s(ranks, [time * batch for time, batch in zip(times, batches, strict=True)])
    unsure_s = 2 * max(rank.compute_error_s for rank in ranks)
    if not new_s < old_s - max(MIN_GAIN * old_s, unsure_s) or _won_nothing(given.current, old_s):
        return None
    reason = (
        f"device speeds {ratios(times)}: local batches {listed(before)} → {listed(batches)}, "
        f"step {old_s:.3g} → {new_s:.3g} s predicted{given.bound_in_words(batches)}"
    )
    return plan_after(
        given,
        decision,
        shares=tuple(map(float, batches)),
        reason=reason,
        measured_s=old_s,
        predicted_s=predicted_step_s(given.profile, old_s, new_s),
    )


def _won_nothing(current: PlanRecord, measured_s: float) -> bool:
    """Return True if `current` left the step as long as it was.

    Then the time does not follow the batch (a fixed cost rules), and more of the same would only starve the slower
    ranks. A step that became much longer is another matter."""
    return current.measured_s * (1 - MIN_GAIN / 2) < measured_s < current.measured_s * (1 + 2 * MIN_GAIN)


def _by_optperf(given: Given, ranks: Sequence[RankProfile], estimates: Sequence[NodeEstimate]) -> PlanRecord | None:
    """Return the plan with the best split, or with the best near the present one if the former is too uncertain."""
    before = [rank.local_batch for rank in ranks]
    low, overlap = least_batch(sum(before), len(ranks)), given.profile.overlap or NO_OVERLAP
    times_s = rank_times(estimates, overlap, before)
    if is_near_best(times_s, least_step_s(estimates, sum(before)) + overlap.t_u, MIN_SPLIT_GAIN):
        return None
    old_s = expected_step_s(ranks, times_s)
    unsure_s = 2 * max(ranks, key=lambda rank: rank.compute_s).compute_error_s
    for max_change in (None, *NEARER_CHANGES):
        decision = OPTPERF.decide(
            OptPerfInput.of_measured(
                total_batch=sum(before),
                nodes=tuple(
                    _within(max_change, low, e, b, high)
                    for e, b, high in zip(estimates, before, given.bounds, strict=True)
                ),
                gamma=overlap.gamma,
                t_o=overlap.t_o,
                t_u=overlap.t_u,
            )
        )
        batches = decision.plan.batches
        then_s = rank_times(estimates, overlap, batches)
        new_s = expected_step_s(ranks, then_s)
        if not new_s < old_s * (1 - MIN_SPLIT_GAIN):
            return None
        unsure = change_uncertainty_s(ranks, estimates, batches)
        if expected_step_s(ranks, [a + b for a, b in zip(then_s, unsure, strict=True)]) < old_s - unsure_s:
            break
    else:
        return None
    bound = decision.plan.bottlenecks.count("communication")
    reason = (
        f"device speeds {ratios([e.compute_s(sum(before) / len(ranks)) for e in estimates])}: local batches "
        f"{listed(before)} → {listed(batches)}, step {old_s:.3g} → {new_s:.3g} s predicted"
        + (f" ({bound} of {len(ranks)} ranks wait for communication)" if bound else "")
        + given.bound_in_words(batches)
    )
    return plan_after(
        given,
        decision,
        shares=tuple(map(float, batches)),
        reason=reason,
        measured_s=max(rank.compute_s for rank in ranks),
        predicted_s=predicted_step_s(given.profile, old_s, new_s),
    )


def _within(max_change: float | None, low: int, estimate: NodeEstimate, batch: int, held: int) -> NodeModel:
    """Return the rank's model, its batch within the factor `max_change` of the present one and what memory holds."""
    if max_change is None:
        return node_model(estimate, low, max(held, low) if held else None)
    least = max(min(low, batch), math.floor(batch / max_change))
    most = max(low, math.ceil(batch * max_change))
    return node_model(estimate, least, max(min(most, held or most), least))
