"""The total batch of strategy `dense`: the one that learns fastest, as the gradients' noise grows over training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from atoll.controller.deciding.first import by_time
from atoll.controller.deciding.given import GAIN, REACH, Given
from atoll.controller.deciding.split import doubts_s, following
from atoll.controller.deciding.stepping import NO_OVERLAP, expected_step_s, predicted, rank_times
from atoll.controller.deciding.words import changed, listed
from atoll.controller.estimators.profile import NoiseEstimate, node_model
from atoll.controller.planners.batches.goodput import (
    GoodputInput,
    GoodputPlan,
    Rule,
    candidates_between,
    learning_rate_factor,
)
from atoll.controller.planners.registry import GOODPUT, Decision
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import NodeEstimate, RankProfile

CANDIDATES: Final = 32
SETTLED_STEPS: Final = 12
"""Of the present plan. Estimators remember 16 whole steps: more would never be seen."""
EXPLORE: Final = 1.25
"""Ranks that were measured with one batch only are shown another: without it no model of their step can be had."""
MOST_NOISE: Final = 1e9
"""Stands in where the gradient may be nothing but noise."""
FACTOR_GAIN: Final = 0.10
"""How far the learning rate's factor may be from what the present noise asks for."""


def explore_batch(given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
    """Another total batch, once, where it may change and the ranks' step models are not known yet. Not where gradients
    tell nothing of their noise: nobody would know what any batch is worth, and it would stay."""
    policy, total = given.policy, sum(rank.local_batch for rank in ranks)
    if given.current.total_batch or not total or not policy.initial_batch or not given.profile.sampled_steps:
        return None
    other = min(math.ceil(total * EXPLORE), policy.max_batch)
    if other <= total:
        other = max(int(total / EXPLORE), policy.min_batch, len(ranks))
    if other == total:
        return None
    times = [rank.compute_s / max(rank.local_batch, 1) for rank in ranks]
    decision = by_time(times, other)
    return following(
        given,
        decision,
        shares=tuple(map(float, decision.plan.batches)),
        total_batch=other,
        learning_rate_factor=_factor(given, other, None),
        reason=f"batch {total} → {other}: to learn how the step's time depends on it",
        measured_s=max(rank.compute_s for rank in ranks),
        predicted_s=0.0,
    )


def next_batch(
    given: Given, ranks: Sequence[RankProfile], estimates: Sequence[NodeEstimate], noise: NoiseEstimate
) -> PlanRecord | None:
    """Total batch, split and learning rate that promise more goodput than the present ones, beyond all doubt.

    A larger batch must be worth it with the least noise that the gradients may have, a smaller one with the most."""
    before = [rank.local_batch for rank in ranks]
    total = sum(before)
    for scale, grows in ((noise.low, True), (min(noise.high, MOST_NOISE), False)):
        decision = _decide(given, estimates, _candidates(given, total), scale)
        plan = decision.plan
        if plan.total_batch != total and (plan.total_batch > total) is grows:
            now = next(c for c in plan.candidates if c.total_batch == total)
            gain = plan.goodput / now.goodput - 1 if now.goodput else math.inf
            if gain > max(GAIN, max(doubts_s(ranks, estimates, plan.batches)) / plan.step_time):
                return _plan(given, before, decision, f"{100 * gain:.0f} % more progress a second predicted")
            if gain > GAIN:
                return _towards(given, ranks, estimates, plan.total_batch, scale)
    return _mended_factor(given, before, estimates, noise)


def _towards(
    given: Given, ranks: Sequence[RankProfile], estimates: Sequence[NodeEstimate], wanted: int, scale: float
) -> PlanRecord | None:
    """A small step to the batch that is wanted but too far away to be sure of: what it takes will be measured there."""
    total = sum(rank.local_batch for rank in ranks)
    if given.current.planner == "goodput" and given.profile.steps < SETTLED_STEPS:
        return None
    near = min(wanted, math.ceil(total * EXPLORE)) if wanted > total else max(wanted, math.floor(total / EXPLORE))
    before = [rank.local_batch for rank in ranks]
    promise = f"a step towards {wanted}, which is too far from what was measured"
    return _plan(given, before, _decide(given, estimates, (near,), scale), promise)


def _mended_factor(
    given: Given, before: Sequence[int], estimates: Sequence[NodeEstimate], noise: NoiseEstimate
) -> PlanRecord | None:
    """The present batch with another learning rate, where the noise has changed too much for the one it has."""
    policy, total, present = given.policy, sum(before), given.current.learning_rate_factor or 1.0
    if policy.rule == "none" or not given.current.total_batch:
        return None
    scales = (noise.low, min(noise.high, MOST_NOISE))
    many = policy.batches_per_update
    wanted = [learning_rate_factor(_rule(given), scale, many * policy.initial_batch, many * total) for scale in scales]
    if any(abs(math.log(factor / present)) <= FACTOR_GAIN for factor in wanted):
        return None
    if (wanted[0] > present) is not (wanted[1] > present):
        return None  # it lies between them
    decision = _decide(given, estimates, (total,), noise.noise_scale)
    return _plan(given, before, decision, f"it was x {present:.3g}")


def _decide(
    given: Given, estimates: Sequence[NodeEstimate], candidates: Sequence[int], scale: float
) -> Decision[GoodputInput, GoodputPlan]:
    overlap = given.profile.overlap or NO_OVERLAP
    return GOODPUT.decide(
        GoodputInput.of_measured(
            candidates=tuple(candidates),
            initial_batch=given.policy.initial_batch,
            noise_scale=scale,
            nodes=tuple(node_model(estimate, 1) for estimate in estimates),
            rule=_rule(given),
            batches_per_update=given.policy.batches_per_update,
            gamma=overlap.gamma,
            t_o=overlap.t_o,
            t_u=overlap.t_u,
        )
    )


def _rule(given: Given) -> Rule:
    return "square-root" if given.policy.rule == "square-root" else "adascale"


def _plan(
    given: Given, before: Sequence[int], decision: Decision[GoodputInput, GoodputPlan], promise: str
) -> PlanRecord:
    planned = decision.plan
    factor = _factor(given, planned.total_batch, planned.learning_rate_factor)
    reason = (
        f"gradient noise scale {decision.given.noise_scale:.0f}: "
        f"{changed('batch', sum(before), planned.total_batch)}, "
        f"local batches {listed(before)} → {listed(planned.batches)}, learning rate x {factor:.3g}, {promise}"
    )
    return following(
        given,
        decision,
        shares=tuple(map(float, planned.batches)),
        total_batch=planned.total_batch,
        learning_rate_factor=factor,
        reason=reason,
        measured_s=max(rank.compute_s for rank in given.profile.ranks.values()),
        predicted_s=_predicted(given, planned.batches),
    )


def _predicted(given: Given, batches: Sequence[int]) -> float:
    ranks = [given.profile.ranks[rank] for rank in range(given.world_size)]
    estimates = [rank.estimate for rank in ranks if rank.estimate is not None]
    overlap = given.profile.overlap
    now_s = expected_step_s(ranks, rank_times(estimates, overlap, [rank.local_batch for rank in ranks]))
    return predicted(given.profile, now_s, expected_step_s(ranks, rank_times(estimates, overlap, batches)))


def _candidates(given: Given, total: int) -> list[int]:
    policy = given.policy
    low = max(policy.min_batch, math.ceil(total / REACH), given.world_size)
    high = min(policy.max_batch, math.floor(total * REACH))
    between = candidates_between(low, high, CANDIDATES) if low <= high else ()
    return sorted({*between, total})


def _factor(given: Given, total: int, planned: float | None) -> float:
    """planned: by the planner's rule. Without one (nothing is known of the noise) the present factor stays: a step of
    EXPLORE is too small to retune for."""
    if given.policy.rule == "none":
        return 1.0
    return planned if planned is not None else given.current.learning_rate_factor or 1.0
