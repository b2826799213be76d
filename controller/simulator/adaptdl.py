"""The total batch as AdaptDL chooses it, which was made for equal devices: a baseline."""

from __future__ import annotations

from typing import cast

import numpy as np

from atoll.controller.deciding.stepping import NO_OVERLAP
from atoll.controller.estimators.profile import node_model
from atoll.controller.planners.batches.even import EvenInput, split_evenly
from atoll.controller.planners.batches.goodput import GoodputInput, Rule, efficiency, plan_goodput
from atoll.controller.planners.batches.optperf import NodeModel, Overlap, step_times
from atoll.controller.simulator.policies import GAIN, Choice, Situation

SECOND_BATCH = 1.25
"""Times the first total batch: a model needs two."""


class AdaptDl:
    """Goodput (Pollux, 2021) with one model for all nodes: the slowest one, which sets every step. Split evenly."""

    splits_evenly = True

    def decide(self, given: Situation) -> Choice | None:
        noise, total = given.profile.noise, sum(given.current.batches)
        if given.measured() is None or noise is None:
            return None
        nodes = _models(given)
        if nodes is None:
            larger = [candidate for candidate in given.candidates if candidate >= SECOND_BATCH * total]
            return _choice(given, larger[0], "a second batch to learn from", None) if larger else None
        share = total / len(nodes)
        slowest = max(nodes, key=lambda node: node.compute_s(share))
        alike = tuple(slowest.model_copy(update=dict(bounds)) for bounds in given.bounds)
        known = given.profile.overlap or NO_OVERLAP
        overlap = Overlap(gamma=known.gamma, t_o=known.t_o, t_u=known.t_u)
        planned = plan_goodput(
            GoodputInput(
                candidates=given.candidates,
                nodes=alike,
                noise_scale=noise.noise_scale,
                initial_batch=given.initial_batch,
                rule=cast(Rule, given.rule),
                **dict(overlap),
            )
        )
        now_s = _step_s(alike, overlap, given.current.batches)
        if planned.goodput < (1 + GAIN) * efficiency(noise.noise_scale, given.initial_batch, total) * total / now_s:
            return None
        reason = f"noise scale {noise.noise_scale:.3g}: batch {total} → {planned.total_batch}"
        return _choice(given, planned.total_batch, reason, (alike, overlap))


def _choice(given: Situation, total: int, reason: str, model: tuple[tuple[NodeModel, ...], Overlap] | None) -> Choice:
    batches = split_evenly(EvenInput(total_batch=total, nodes=given.bounds)).batches
    predicted_s = _step_s(*model, batches) if model else 0.0
    return Choice(
        batches=batches, params=given.current.params, planner="adaptdl", reason=reason, predicted_s=predicted_s
    )


def _models(given: Situation) -> tuple[NodeModel, ...] | None:
    """None before every rank has one."""
    known = given.profile.ranks
    estimates = [known[rank].estimate for rank in range(len(given.bounds)) if rank in known]
    nodes = [
        node_model(e, bounds.min_batch, bounds.max_batch)
        for e, bounds in zip(estimates, given.bounds, strict=False)
        if e is not None
    ]
    return tuple(nodes) if len(nodes) == len(given.bounds) else None


def _step_s(nodes: tuple[NodeModel, ...], overlap: Overlap, batches: tuple[int, ...]) -> float:
    return float(step_times(nodes, overlap).at(np.array(batches, dtype=np.float64)).max())
