"""AdaptDL's choice of the total batch, made for equal devices, as a policy of the simulator.

Source: Pollux / AdaptDL (Qiao et al., 2021). The slowest rank's model stands for all: it sets every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from atoll.controller.deciding.cost_model import NO_OVERLAP
from atoll.controller.deciding.given import Given
from atoll.controller.estimators.profile import node_model
from atoll.controller.planners.batches.goodput import GoodputInput, Rule, candidates_between, efficiency, plan_goodput
from atoll.controller.planners.batches.optperf import NodeModel, Overlap, step_times
from atoll.controller.planners.batches.splits import EvenInput, split_evenly
from atoll.controller.planners.batches.water_filling import Bounds
from atoll.controller.simulator.policies import MIN_BASELINE_GAIN, SimulatedPolicy, following
from atoll.controller.simulator.scenario import Scenario
from atoll.controller.state.records import PlanRecord

MAX_CANDIDATES: Final = 50
"""Total batches to choose from."""
SECOND_BATCH: Final = 1.25
"""Ratio of the second total batch to the first: a model of a rank needs two."""


def adaptdl(given: Given, bounds: Sequence[Bounds], scenario: Scenario) -> PlanRecord | None:
    """Return the total batch of the highest goodput if all ranks were like the slowest, split evenly."""
    ranks, noise = given.ranks(), given.profile.noise
    if ranks is None or noise is None:
        return None
    batches = [round(share) for share in given.current.shares]
    total, policy = sum(batches), given.policy
    candidates = candidates_between(policy.min_batch, policy.max_batch, MAX_CANDIDATES)
    estimates = [rank.estimate for rank in ranks if rank.estimate is not None]
    if len(estimates) < len(ranks):
        larger = [candidate for candidate in candidates if candidate >= SECOND_BATCH * total]
        return following(given, _even(larger[0], bounds), "adaptdl", "a second batch to learn from") if larger else None
    slowest = max(estimates, key=lambda estimate: estimate.compute_s(total / len(ranks)))
    alike = tuple(node_model(slowest, each.min_batch, each.max_batch) for each in bounds)
    known = given.profile.overlap or NO_OVERLAP
    overlap = Overlap(gamma=known.gamma, t_o=known.t_o, t_u=known.t_u)
    planned = plan_goodput(
        GoodputInput(
            candidates=candidates,
            nodes=alike,
            noise_scale=noise.noise_scale,
            initial_batch=policy.initial_batch,
            rule=cast(Rule, policy.rule),
            **dict(overlap),
        )
    )
    now = efficiency(noise.noise_scale, policy.initial_batch, total) * total / _step_s(alike, overlap, batches)
    if planned.goodput < (1 + MIN_BASELINE_GAIN) * now:
        return None
    reason = f"noise scale {noise.noise_scale:.3g}: batch {total} → {planned.total_batch}"
    even = _even(planned.total_batch, bounds)
    return following(given, even, "adaptdl", reason, predicted_s=_step_s(alike, overlap, even))


def _even(total: int, bounds: Sequence[Bounds]) -> tuple[int, ...]:
    return split_evenly(EvenInput(total_batch=total, nodes=tuple(bounds))).batches


def _step_s(nodes: tuple[NodeModel, ...], overlap: Overlap, batches: Sequence[int]) -> float:
    return float(step_times(nodes, overlap).at(np.array(batches, dtype=np.float64)).max())


ADAPTDL: Final = SimulatedPolicy(
    what="total batch with the highest goodput if all ranks were as the slowest; even split",
    decide=adaptdl,
    batch=True,
    even=True,
)
