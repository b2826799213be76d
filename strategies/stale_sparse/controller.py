"""Controller half: sparsity, total batch and split as links and devices allow. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from atoll.controller.deciding.cost_model import change_uncertainty_s, expected_step_s, predicted_step_s
from atoll.controller.deciding.first import bound_of, least_batch
from atoll.controller.deciding.given import MAX_BATCH_CHANGE, MIN_GAIN, Given, plan_after
from atoll.controller.deciding.words import changed, listed, mbit, percent
from atoll.controller.estimators.saturation import SaturationEstimate, curve_of
from atoll.controller.planners.islands.wire_bytes import VALUE_BYTES, update_density
from atoll.controller.planners.registry import TTA, Decision
from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.controller.planners.time_to_accuracy.tta import (
    MeasuredDevice,
    SaturatingDevice,
    SparsityCost,
    TtaInput,
    TtaPlan,
    assess_tta,
)
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import RankProfile
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.stale_sparse.sparsity_cost import SparsityCostEstimate, SparsityCostEstimator

SAMPLES: Final = 1_000_000
"""Placeholder for the unknown samples until the accuracy is reached. Only ratios of predictions count."""
USED: Final = 0.6
"""Share of the estimated bandwidth that a plan may fill. Ranks send in bursts, and bandwidth changes before a plan can
follow: a sparsity that just fits stalls (docs/simulator.md). Over-estimates hurt more (StellaTrain, section 6)."""

PRIOR: Final = Surrogate(
    sparsities=(0.8, 0.9, 0.99, 0.995, 0.999, 0.9999),
    batches=(1.0, 2.0**30),
    extra=((0.05,) * 2, (0.06,) * 2, (0.2,) * 2, (0.22,) * 2, (0.26,) * 2, (0.45,) * 2),
)
"""Extra loss without an offline profile: up to 0.99 as the race of docs/performance.md measured it, beyond that a guess
that grows with sparsity. With a fixed total batch it only decides not to drop more than links require, or than it
costs the workers. It knows too little of a model to send more than its user requested."""


class StaleSparseController:
    """Controller half of one job. See atoll.controller.deciding.given."""

    def __init__(self, settings: StaleSparse) -> None:
        self._value_bytes = VALUE_BYTES[settings.values]
        self._prior = _prior_from(settings.sparsity)

    def estimator(self) -> SparsityCostEstimator:
        return SparsityCostEstimator()

    def next_plan(self, given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
        """Return the next plan. None while the present one is good enough, or nothing is known of the links.

        Raises NoFeasiblePlan where the links do not carry even the largest sparsity within a step."""
        if not (given.policy.may_change("sparsity") or given.policy.adapts_batch):
            return None
        asked = _ask(given, ranks, self._value_bytes, given.policy.surrogate or self._prior)
        return None if asked is None else _next(given, ranks, asked)


def _next(given: Given, ranks: Sequence[RankProfile], asked: TtaInput) -> PlanRecord | None:
    before = [rank.local_batch for rank in ranks]
    now = assess_tta(asked, given.current.strategy_params.get("sparsity", 0.0), before)
    decision = TTA.decide(asked)
    planned = decision.plan
    if not _worth_it(ranks, now, planned):
        return None
    adapted = sum(before) != planned.total_batch
    return plan_after(
        given,
        decision,
        shares=tuple(map(float, planned.batches)),
        strategy_params={"sparsity": round(planned.sparsity, 6)}
        if given.policy.may_change("sparsity")
        else given.current.strategy_params,
        total_batch=planned.total_batch if adapted else given.current.total_batch,
        learning_rate_factor=_factor(given, planned.total_batch) if adapted else given.current.learning_rate_factor,
        reason=_reason(given, decision, now),
        measured_s=max(rank.compute_s for rank in ranks),
        predicted_s=_predicted(given, ranks, now, planned),
    )


def _prior_from(sparsity: float) -> Surrogate:
    """Return PRIOR from the user's own sparsity on."""
    least = min(sparsity, PRIOR.sparsities[-1])
    above = [(one, row) for one, row in zip(PRIOR.sparsities, PRIOR.extra, strict=True) if one > least]
    own = (least, tuple(PRIOR.at(least, batch) for batch in PRIOR.batches))
    sparsities, extra = zip(own, *above, strict=True)
    return Surrogate(sparsities=sparsities, batches=PRIOR.batches, extra=extra)


def _ask(given: Given, ranks: Sequence[RankProfile], value_bytes: float, convergence: Surrogate) -> TtaInput | None:
    profile = given.profile
    islands = sorted(set(given.islands)) or [""]
    total = sum(rank.local_batch for rank in ranks)
    sparsity = given.current.strategy_params.get("sparsity")
    if total < len(ranks) or not profile.entries or sparsity is None or len(given.islands) != len(ranks):
        return None
    if len(islands) > 1 and any(name not in profile.links for name in islands):
        return None
    asked = TtaInput.of_measured(
        devices=tuple(
            _device(given, rank, islands.index(given.islands[i]), total, given.bounds[i])
            for i, rank in enumerate(ranks)
        ),
        bandwidths=tuple(
            USED * profile.links[name].bandwidth_bps / 8 if name in profile.links else 1e12 for name in islands
        ),
        entries=profile.entries,
        samples=SAMPLES,
        surrogate=_surrogate(given, convergence),
        totals=_totals(given, total, len(ranks)),
        value_bytes=value_bytes,
    )
    dense_s = _dense_s(given)
    if not dense_s > 0:
        return asked
    return asked.model_copy(update={"sparsity_cost": SparsityCost.of_measured(seconds=dense_s, sparsity=sparsity)})


def _dense_s(given: Given) -> float:
    """Return the seconds that a step takes longer with density 1 than with 0; 0 where that is not known."""
    cost = given.profile.of_strategy
    return cost.dense_s if isinstance(cost, SparsityCostEstimate) else 0.0


def _totals(given: Given, total: int, ranks: int) -> tuple[int, int]:
    """Return the bounds of the total batch. Without an offline profile the cost of another one is unknown."""
    policy = given.policy
    if not policy.adapts_batch or policy.surrogate is None:
        return total, total
    low = max(policy.min_batch, math.ceil(total / MAX_BATCH_CHANGE), math.ceil(policy.surrogate.batches[0]), ranks)
    most = (policy.max_batch, total * MAX_BATCH_CHANGE, policy.surrogate.batches[-1], given.most_samples)
    high = math.floor(min(most))
    return (low, high) if low <= high else (total, total)


def _device(given: Given, rank: RankProfile, island: int, total: int, held: int) -> MeasuredDevice | SaturatingDevice:
    """Return a rank's step times: its estimate, else in proportion to the batch. A fixed split becomes bounds.

    held: samples that its memory holds, 0 if nothing bounds them."""
    low = least_batch(total, given.world_size)
    bounds = {"min_batch": low, **bound_of(held, low)}
    if given.policy.fixed_split:
        bounds = {"min_batch": rank.local_batch, "max_batch": rank.local_batch}
    curve = curve_of(rank)
    if isinstance(curve, SaturationEstimate):
        return SaturatingDevice.of_measured(alpha=curve.alpha, beta=curve.beta, island=island, **bounds)
    if curve is not None:
        return MeasuredDevice.of_measured(q=curve.q, s=curve.s, k=curve.k, m=curve.m, island=island, **bounds)
    per_sample_s = rank.compute_s / max(rank.local_batch, 1)
    return MeasuredDevice.of_measured(q=per_sample_s, s=0.0, k=0.0, m=0.0, island=island, **bounds)


def _surrogate(given: Given, known: Surrogate) -> Surrogate:
    """Return the cost of convergence; at the present sparsity alone where the planner may not change it."""
    sparsity = given.current.strategy_params.get("sparsity", 0.0)
    if given.policy.may_change("sparsity"):
        return known
    extra = tuple(known.at(sparsity, batch) for batch in known.batches)
    return Surrogate(sparsities=(sparsity,), batches=known.batches, extra=(extra,))


def _worth_it(ranks: Sequence[RankProfile], now: TtaPlan, planned: TtaPlan) -> bool:
    """Return True if the gain exceeds MIN_GAIN and the uncertainty.

    Steps as they are have one, and batches that move away from where they were measured have another."""
    unsure = max(rank.compute_error_s / rank.compute_s for rank in ranks)
    estimates = [rank.estimate for rank in ranks if rank.estimate is not None]
    moved_s = max(change_uncertainty_s(ranks, estimates, planned.batches)) if len(estimates) == len(ranks) else 0.0
    return planned.tta < now.tta * (1 - max(MIN_GAIN, 2 * unsure, moved_s / now.step_time))


def _predicted(given: Given, ranks: Sequence[RankProfile], now: TtaPlan, planned: TtaPlan) -> float:
    """Predict the step's seconds with the devices' unsteadiness. A step is not shorter than its links allow."""

    curves = [curve_of(rank) for rank in ranks]

    def alone(batches: Sequence[int]) -> list[float]:
        return [
            curve.compute_s(batch) if curve else rank.compute_s * batch / max(rank.local_batch, 1)
            for curve, rank, batch in zip(curves, ranks, batches, strict=True)
        ]

    now_s = expected_step_s(ranks, alone(now.batches))
    more = update_density(planned.sparsity, len(ranks)) - update_density(now.sparsity, len(ranks))
    then_s = max(expected_step_s(ranks, alone(planned.batches)) + _dense_s(given) * more, planned.communication_time)
    return predicted_step_s(given.profile, now_s, then_s)


def _factor(given: Given, total: int) -> float:
    """Return the learning rate's factor: the square root, with which the offline profile measured what batches cost.

    docs/adaptation.md explains why the measured noise decides nothing here."""
    if given.policy.rule == "none" or not given.policy.initial_batch:
        return 1.0
    return math.sqrt(total / given.policy.initial_batch)


def _reason(given: Given, decision: Decision[TtaInput, TtaPlan], now: TtaPlan) -> str:
    """Return 'bandwidth 480 → 95 Mbit/s: sparsity 97.00 → 99.50 %, batch 137 → 240'."""
    proposed, planned = [], decision.plan
    if given.policy.may_change("sparsity"):
        proposed.append(changed("sparsity", percent(now.sparsity), percent(planned.sparsity), " %"))
    proposed.append(changed("batch", now.total_batch, planned.total_batch))
    if now.batches != planned.batches:
        proposed.append(f"local batches {listed(now.batches)} → {listed(planned.batches)}")
    proposed.append(f"step {now.step_time:.3g} → {planned.step_time:.3g} s predicted")
    return f"{_bandwidth(given, decision.given)}{', '.join(proposed)}"


def _bandwidth(given: Given, asked: TtaInput) -> str:
    """Return the thinnest link's bandwidth, against that of the last plan that used links."""
    if len(set(given.islands)) < 2:
        return ""
    now = mbit(min(asked.bandwidths) * 8 / USED)
    if given.current.planner != TTA.name:
        return f"bandwidth {now} Mbit/s: "
    then = mbit(min(TTA.read(given.current.input).bandwidths) * 8 / USED)
    return changed("bandwidth", then, now, " Mbit/s: ")
