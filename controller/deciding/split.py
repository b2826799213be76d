"""The split of a fixed total batch: Eq. 8 until every rank was measured with two batches, then OptPerf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from atoll.controller.deciding.first import by_time, least_batch
from atoll.controller.deciding.given import GAIN, Given, lead_steps
from atoll.controller.deciding.stepping import NO_OVERLAP, expected_step_s, predicted, rank_times
from atoll.controller.deciding.words import listed, ratios
from atoll.controller.estimators.profile import node_model
from atoll.controller.planners.batches.optperf import NodeModel, OptPerfInput
from atoll.controller.planners.registry import OPTPERF, Decision
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import NodeEstimate, RankProfile

FAR_SHARE: Final = 0.2
"""Of its newest batch: so far away lies what the error of a NodeEstimate is of."""
NEAR: Final = (1.2, 1.1)
"""Where the best split is too far to be sure of, batches change by these factors at most: a rank is doubted less the
less its batch changes, and the nearer split tells more of it."""
SPLIT_GAIN: Final = 0.03
"""As GAIN, where the step's model is known: plans that it makes do not lead away from the best."""


def next_split(given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
    """The split that should follow the present one; None while it is good enough."""
    estimates = [rank.estimate for rank in ranks if rank.estimate is not None]
    if len(estimates) < len(ranks) or given.policy.split == "inverse-time":
        return _by_inverse_time(given, ranks)
    return _by_optperf(given, ranks, estimates)


def following(given: Given, decision: Decision[Any, Any], **changes: Any) -> PlanRecord:
    """The plan after the present one, as its planner decided."""
    current = given.current
    return replace(
        current,
        id=current.id + 1,
        from_step=given.profile.newest_step + lead_steps(given.profile.step_s),
        planner=decision.planner.name,
        input=decision.input,
        output=decision.output,
        **changes,
    )


def doubts_s(ranks: Sequence[RankProfile], estimates: Sequence[NodeEstimate], batches: Sequence[int]) -> list[float]:
    """Two standard errors of how much each rank's time changes with these batches, in seconds.

    What the present batches take is measured; a model is doubted for what it says beyond them. Its error is that of a
    prediction FAR_SHARE away, and grows with the way. What synchronisation takes is the same before and after."""
    far = [
        abs(batch - rank.local_batch) / max(FAR_SHARE * rank.local_batch, 1.0)
        for rank, batch in zip(ranks, batches, strict=True)
    ]
    return [2 * e.error * e.compute_s(b) * way for e, b, way in zip(estimates, batches, far, strict=True)]


def _by_inverse_time(given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
    total = sum(rank.local_batch for rank in ranks)
    if total < len(ranks) or any(rank.local_batch == 0 for rank in ranks):
        return None
    times = [rank.compute_s / rank.local_batch for rank in ranks]
    if _even([rank.compute_s for rank in ranks], total / sum(1 / time for time in times), GAIN):
        return None
    decision = by_time(times, total)
    batches = decision.plan.batches
    before = [rank.local_batch for rank in ranks]
    old_s = expected_step_s(ranks, [rank.compute_s for rank in ranks])
    new_s = expected_step_s(ranks, [time * batch for time, batch in zip(times, batches, strict=True)])
    unsure_s = 2 * max(rank.compute_error_s for rank in ranks)
    if not new_s < old_s - max(GAIN * old_s, unsure_s) or _won_nothing(given.current, old_s):
        return None
    reason = (
        f"device speeds {ratios(times)}: local batches {listed(before)} → {listed(batches)}, "
        f"step {old_s:.3g} → {new_s:.3g} s predicted"
    )
    return following(
        given,
        decision,
        shares=tuple(map(float, batches)),
        reason=reason,
        measured_s=old_s,
        predicted_s=predicted(given.profile, old_s, new_s),
    )


def _even(times_s: Sequence[float], least_s: float, gain: float) -> bool:
    """Whether no split can shorten the step by `gain`, so that the planner need not be asked.

    least_s: what all ranks would take, could the batch be split so that they end at once. A step ends the later for its
    ranks' unsteadiness, in proportion: with all at least_s by no less than (1 - gain) of what it does with none later
    than least_s / (1 - gain)."""
    return max(times_s) * (1 - gain) <= least_s


def _least_s(estimates: Sequence[NodeEstimate], total: int) -> float:
    """Seconds in which all ranks compute a step of `total` samples together, ending at once: the T with

    sum_i (T - s_i - m_i) / (q_i + k_i) = total
    """
    per_s = [1 / (e.q + e.k) for e in estimates]
    fixed = math.fsum((e.s + e.m) * each for e, each in zip(estimates, per_s, strict=True))
    return (total + fixed) / math.fsum(per_s)


def _won_nothing(current: PlanRecord, measured_s: float) -> bool:
    """Whether `current` left the step as long as it was: then time does not follow the batch (a fixed cost rules), and
    more of the same would only starve the slower ranks. A step that became much longer is another matter."""
    return current.measured_s * (1 - GAIN / 2) < measured_s < current.measured_s * (1 + 2 * GAIN)


def _by_optperf(given: Given, ranks: Sequence[RankProfile], estimates: Sequence[NodeEstimate]) -> PlanRecord | None:
    """The best split, or where that is too far to be sure of, the best of those near the present one."""
    before = [rank.local_batch for rank in ranks]
    low, overlap = least_batch(sum(before), len(ranks)), given.profile.overlap or NO_OVERLAP
    times_s = rank_times(estimates, overlap, before)
    if _even(times_s, _least_s(estimates, sum(before)) + overlap.t_u, SPLIT_GAIN):
        return None
    old_s = expected_step_s(ranks, times_s)
    unsure_s = 2 * max(ranks, key=lambda rank: rank.compute_s).compute_error_s
    for reach in (None, *NEAR):
        decision = OPTPERF.decide(
            OptPerfInput.of_measured(
                total_batch=sum(before),
                nodes=tuple(_within(reach, low, e, b) for e, b in zip(estimates, before, strict=True)),
                gamma=overlap.gamma,
                t_o=overlap.t_o,
                t_u=overlap.t_u,
            )
        )
        batches = decision.plan.batches
        then_s = rank_times(estimates, overlap, batches)
        new_s = expected_step_s(ranks, then_s)
        if not new_s < old_s * (1 - SPLIT_GAIN):
            return None
        doubts = doubts_s(ranks, estimates, batches)
        if expected_step_s(ranks, [a + b for a, b in zip(then_s, doubts, strict=True)]) < old_s - unsure_s:
            break
    else:
        return None
    bound = decision.plan.bottlenecks.count("communication")
    reason = (
        f"device speeds {ratios([e.compute_s(sum(before) / len(ranks)) for e in estimates])}: local batches "
        f"{listed(before)} → {listed(batches)}, step {old_s:.3g} → {new_s:.3g} s predicted"
        + (f" ({bound} of {len(ranks)} ranks wait for communication)" if bound else "")
    )
    return following(
        given,
        decision,
        shares=tuple(map(float, batches)),
        reason=reason,
        measured_s=max(rank.compute_s for rank in ranks),
        predicted_s=predicted(given.profile, old_s, new_s),
    )


def _within(reach: float | None, low: int, estimate: NodeEstimate, batch: int) -> NodeModel:
    """The rank's model, its batch within this factor of the present one."""
    if reach is None:
        return node_model(estimate, low)
    return node_model(estimate, max(min(low, batch), math.floor(batch / reach)), max(low, math.ceil(batch * reach)))
