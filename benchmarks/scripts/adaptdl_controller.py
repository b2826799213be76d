"""Atoll's controller with AdaptDL's rule in place of Atoll's: python adaptdl_controller.py controller --listen ...

Source: Pollux / AdaptDL (Qiao et al., 2021): the total batch with the highest goodput, where all nodes are taken to be
like the slowest, which sets every step, and share the batch evenly. Telemetry, estimators and all else are the same; of
even batches the pooled noise scale is the plain mean that AdaptDL takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.cli.main import main
from atoll.controller.deciding.batch import MAX_CANDIDATES, SETTLED_STEPS, explore_batch
from atoll.controller.deciding.cost_model import NO_OVERLAP
from atoll.controller.deciding.given import MAX_BATCH_CHANGE, MIN_GAIN, MIN_INTERVAL_S, Given, lead_steps
from atoll.controller.estimators.profile import node_model
from atoll.controller.jobs.lifecycle import reconcile
from atoll.controller.planners.batches.goodput import GoodputInput, candidates_between, plan_goodput
from atoll.controller.planners.batches.splits import EvenInput, split_evenly
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import NodeEstimate


def next_plan(given: Given) -> PlanRecord | None:
    ranks = given.ranks()
    if given.now_s < given.planned_s + MIN_INTERVAL_S or ranks is None or not given.policy.initial_batch:
        return None
    before = [rank.local_batch for rank in ranks]
    if max(before) - min(before) > 1:
        return _planned(given, sum(before), given.current.learning_rate_factor or 1.0, "even batches")
    estimates = [rank.estimate for rank in ranks if rank.estimate is not None]
    if len(estimates) < len(ranks):
        other = explore_batch(given, ranks)
        return other and _planned(given, other.total_batch, other.learning_rate_factor, other.reason)
    noise = given.profile.noise
    if noise is None or given.profile.steps < SETTLED_STEPS:
        return None
    planned = plan_goodput(_input(given, estimates, sum(before), noise.noise_scale))
    now = next(c for c in planned.candidates if c.total_batch == sum(before))
    if planned.goodput < (1 + MIN_GAIN) * (now.goodput or 0.0):
        return None
    reason = f"noise scale {noise.noise_scale:.0f}: batch {sum(before)} → {planned.total_batch}"
    return _planned(given, planned.total_batch, planned.learning_rate_factor, reason)


def _input(given: Given, estimates: Sequence[NodeEstimate], total: int, noise_scale: float) -> GoodputInput:
    low, high = (
        max(given.policy.min_batch, round(total / MAX_BATCH_CHANGE)),
        min(given.policy.max_batch, round(total * MAX_BATCH_CHANGE)),
    )
    slowest = max(estimates, key=lambda e: e.compute_s(total / len(estimates)))
    overlap = given.profile.overlap or NO_OVERLAP
    return GoodputInput(
        candidates=tuple(sorted({*candidates_between(low, high, MAX_CANDIDATES), total})),
        initial_batch=given.policy.initial_batch,
        noise_scale=noise_scale,
        nodes=(node_model(slowest, 1),) * len(estimates),
        gamma=overlap.gamma,
        t_o=overlap.t_o,
        t_u=overlap.t_u,
    )


def _planned(given: Given, total: int, factor: float, reason: str) -> PlanRecord:
    batches = split_evenly(EvenInput(total_batch=total, nodes=given.world_size)).batches
    return replace(
        given.current,
        id=given.current.id + 1,
        from_step=given.profile.newest_step + lead_steps(given.profile.step_s),
        planner="adaptdl",
        input="{}",
        output="{}",
        shares=tuple(map(float, batches)),
        total_batch=total,
        learning_rate_factor=factor,
        reason=reason,
    )


if __name__ == "__main__":
    vars(reconcile)["next_plan"] = next_plan
    main()
