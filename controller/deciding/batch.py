"""Chooses the total batch of strategy `dense`: the one that learns fastest, as gradient noise grows over training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from atoll.controller.deciding.cost_model import (
    NO_OVERLAP,
    change_uncertainty_s,
    expected_step_s,
    predicted_step_s,
    rank_times,
)
from atoll.controller.deciding.first import by_time
from atoll.controller.deciding.given import MAX_BATCH_CHANGE, MIN_GAIN, Given, plan_after
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

MAX_CANDIDATES: Final = 32
"""Total batches that one decision compares."""
SETTLED_STEPS: Final = 12
"""Steps under the present plan before the next step towards a far batch. Estimators remember 16 whole steps."""
EXPLORATION_FACTOR: Final = 1.25
"""Change of the total batch that shows the ranks a second batch: without one their step cannot be modelled."""
MAX_NOISE_SCALE: Final = 1e9
"""Noise scale of a gradient that may be nothing but noise."""
MAX_FACTOR_ERROR: Final = 0.10
"""Largest logarithmic error of the learning rate's factor that stays uncorrected."""


def explore_batch(given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
    """Return a plan with another total batch, once, if it may change and the ranks' step models are not known yet.

    Return None if gradients tell nothing about their noise: no batch's worth would be known, and it would stay."""
    policy, total = given.policy, sum(rank.local_batch for rank in ranks)
    if given.current.total_batch or not total or not policy.initial_batch or not given.profile.sampled_steps:
        return None
    other = int(min(math.ceil(total * EXPLORATION_FACTOR), policy.max_batch, given.most_samples))
    if other <= total:
        other = max(int(total / EXPLORATION_FACTOR), policy.min_batch, len(ranks))
    if other == total:
        return None
    times = [rank.compute_s / max(rank.local_batch, 1) for rank in ranks]
    decision = by_time(times, other, given.bounds)
    return plan_after(
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
    """Return a plan whose total batch, split and learning rate promise more goodput, beyond their uncertainty.

    A larger batch must be worth it with the least noise that the gradients may have, a smaller one with the most."""
    total = sum(rank.local_batch for rank in ranks)
    for scale, grows in ((noise.low, True), (min(noise.high, MAX_NOISE_SCALE), False)):
        decision = _decide(given, estimates, _candidates(given, total), scale)
        plan = decision.plan
        if plan.total_batch != total and (plan.total_batch > total) is grows:
            now = next(c for c in plan.candidates if c.total_batch == total)
            gain = plan.goodput / now.goodput - 1 if now.goodput else math.inf
            if gain > max(MIN_GAIN, max(change_uncertainty_s(ranks, estimates, plan.batches)) / plan.step_time):
                return _plan(given, decision, f"{100 * gain:.0f} % more progress a second predicted")
            if gain > MIN_GAIN:
                return _towards(given, ranks, estimates, plan.total_batch, scale)
    return _mended_factor(given, total, estimates, noise)


def _towards(
    given: Given, ranks: Sequence[RankProfile], estimates: Sequence[NodeEstimate], wanted: int, scale: float
) -> PlanRecord | None:
    """Return a plan one small step towards a batch that is too far to be sure of; its cost is measured there."""
    total = sum(rank.local_batch for rank in ranks)
    if given.current.planner == "goodput" and given.profile.steps < SETTLED_STEPS:
        return None
    near = (
        min(wanted, math.ceil(total * EXPLORATION_FACTOR))
        if wanted > total
        else max(wanted, math.floor(total / EXPLORATION_FACTOR))
    )
    promise = f"a step towards {wanted}, which is too far from what was measured"
    return _plan(given, _decide(given, estimates, (near,), scale), promise)


def _mended_factor(
    given: Given, total: int, estimates: Sequence[NodeEstimate], noise: NoiseEstimate
) -> PlanRecord | None:
    """Return the present batch with another learning rate, if the noise has changed too much for the present one."""
    policy, present = given.policy, given.current.learning_rate_factor or 1.0
    if policy.rule == "none" or not given.current.total_batch:
        return None
    scales = (noise.low, min(noise.high, MAX_NOISE_SCALE))
    many = policy.batches_per_update
    wanted = [learning_rate_factor(_rule(given), scale, many * policy.initial_batch, many * total) for scale in scales]
    if any(abs(math.log(factor / present)) <= MAX_FACTOR_ERROR for factor in wanted):
        return None
    if (wanted[0] > present) is not (wanted[1] > present):
        return None  # it lies between them
    decision = _decide(given, estimates, (total,), noise.noise_scale)
    return _plan(given, decision, f"it was x {present:.3g}")


def _decide(
    given: Given, estimates: Sequence[NodeEstimate], candidates: Sequence[int], scale: float
) -> Decision[GoodputInput, GoodputPlan]:
    overlap = given.profile.overlap or NO_OVERLAP
    return GOODPUT.decide(
        GoodputInput.of_measured(
            candidates=tuple(candidates),
            initial_batch=given.policy.initial_batch,
            noise_scale=scale,
            nodes=tuple(
                node_model(estimate, 1, high or None) for estimate, high in zip(estimates, given.bounds, strict=True)
            ),
            rule=_rule(given),
            batches_per_update=given.policy.batches_per_update,
            gamma=overlap.gamma,
            t_o=overlap.t_o,
            t_u=overlap.t_u,
        )
    )


def _rule(given: Given) -> Rule:
    return "square-root" if given.policy.rule == "square-root" else "adascale"


def _plan(given: Given, decision: Decision[GoodputInput, GoodputPlan], promise: str) -> PlanRecord:
    planned, overlap = decision.plan, given.profile.overlap
    ranks = [given.profile.ranks[rank] for rank in range(given.world_size)]
    estimates = [rank.estimate for rank in ranks if rank.estimate is not None]
    before = [rank.local_batch for rank in ranks]
    now_s, then_s = (expected_step_s(ranks, rank_times(estimates, overlap, each)) for each in (before, planned.batches))
    factor = _factor(given, planned.total_batch, planned.learning_rate_factor)
    reason = (
        f"gradient noise scale {decision.given.noise_scale:.0f}: "
        f"{changed('batch', sum(before), planned.total_batch)}, "
        f"local batches {listed(before)} → {listed(planned.batches)}, learning rate x {factor:.3g}, {promise}"
        f"{given.bound_in_words(planned.batches)}"
    )
    return plan_after(
        given,
        decision,
        shares=tuple(map(float, planned.batches)),
        total_batch=planned.total_batch,
        learning_rate_factor=factor,
        reason=reason,
        measured_s=max(rank.compute_s for rank in given.profile.ranks.values()),
        predicted_s=predicted_step_s(given.profile, now_s, then_s),
    )


def _candidates(given: Given, total: int) -> list[int]:
    policy = given.policy
    low = max(policy.min_batch, math.ceil(total / MAX_BATCH_CHANGE), given.world_size)
    high = int(min(policy.max_batch, math.floor(total * MAX_BATCH_CHANGE), given.most_samples))
    between = candidates_between(low, high, MAX_CANDIDATES) if low <= high else ()
    return sorted({*between, total})


def _factor(given: Given, total: int, planned: float | None) -> float:
    """Return the learning rate's factor. planned: by the planner's rule, None if nothing is known of the noise.

    Without it the present factor stays: a change of EXPLORATION_FACTOR is too small to retune for."""
    if given.policy.rule == "none":
        return 1.0
    return planned if planned is not None else given.current.learning_rate_factor or 1.0
