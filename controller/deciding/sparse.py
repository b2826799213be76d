"""Compression rate, total batch and split of strategy `stale-sparse`, as links and devices allow."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from atoll.controller.deciding.first import least_batch
from atoll.controller.deciding.given import GAIN, PRIOR, REACH, Given
from atoll.controller.deciding.split import following
from atoll.controller.deciding.stepping import predicted, slowest
from atoll.controller.deciding.words import changed, listed, mbit, percent
from atoll.controller.estimators.profile import RankProfile
from atoll.controller.estimators.saturation import SaturationEstimate, curve_of
from atoll.controller.planners import forms
from atoll.controller.planners.registry import PLANNERS, canonical
from atoll.controller.planners.tta import TtaPlan, assess_tta
from atoll.controller.state.records import PlanRecord
from atoll.errors import NoFeasiblePlan

SAMPLES: Final = 1_000_000
"""Stands in for the samples until the accuracy is reached, which nobody knows; only ratios of predictions count."""
RATE_GAIN: Final = 1.25
"""Where time to accuracy hardly changes, the rate still follows when what is sent would change by this factor."""
USED: Final = 0.6
"""Of the estimated bandwidth that a plan may fill. What is sent comes in bursts, and bandwidth changes before a plan
can follow: a rate that just fits stalls (docs/simulator.md). Over-estimates hurt more (StellaTrain, section 6)."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """A planner's input, and what the present plan does under it."""

    text: str
    data: Mapping[str, Any]
    now: TtaPlan


def next_sparse(given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
    """The plan that should follow; None while the present one is good enough, or nothing is known of the links."""
    sight = _look(given, ranks)
    if sight is None:
        return None
    try:
        output = PLANNERS["tta"].run_json(sight.text)
    except NoFeasiblePlan:
        return None  # the links carry not even the largest rate within a step: it is in force, or nothing helps
    planned = json.loads(output)
    if not _worth_it(given, ranks, sight.now, planned):
        return None
    before = [rank.local_batch for rank in ranks]
    adapted = sum(before) != planned["total_batch"]
    return following(
        given,
        "tta",
        sight.text,
        output,
        shares=tuple(float(batch) for batch in planned["batches"]),
        rate=round(planned["rate"], 6) if given.policy.adapts_rate else given.current.rate,
        total_batch=planned["total_batch"] if adapted else given.current.total_batch,
        learning_rate_factor=_factor(given, planned["total_batch"]) if adapted else given.current.learning_rate_factor,
        reason=_reason(given, sight, planned, before),
        measured_s=max(rank.compute_s for rank in ranks),
        predicted_s=_predicted(given, ranks, sight.now, planned),
    )


def _look(given: Given, ranks: Sequence[RankProfile]) -> _Sight | None:
    profile, policy = given.profile, given.policy
    islands = sorted(set(given.islands)) or [""]
    total = sum(rank.local_batch for rank in ranks)
    rate = given.current.rate
    if total < len(ranks) or not profile.entries or rate is None or len(given.islands) != len(ranks):
        return None
    if len(islands) > 1 and any(name not in profile.links for name in islands):
        return None
    low, high = _totals(given, total, len(ranks))
    data = {
        "devices": [_device(given, rank, islands.index(given.islands[i]), total) for i, rank in enumerate(ranks)],
        "bandwidths": [
            USED * profile.links[name].bandwidth_bps / 8 if name in profile.links else 1e12 for name in islands
        ],
        "entries": profile.entries,
        "samples": SAMPLES,
        "surrogate": _surrogate(given),
        "totals": [low, high],
        "value_bytes": policy.value_bytes,
    }
    if profile.rate_cost is not None and profile.rate_cost.kept_s > 0:
        data |= {"rate_cost": {"seconds": profile.rate_cost.kept_s, "rate": rate}}
    now = assess_tta(forms.tta_input(data), rate, [rank.local_batch for rank in ranks])
    return _Sight(canonical(data), data, now)


def _totals(given: Given, total: int, ranks: int) -> tuple[int, int]:
    """The total batches to choose from. Without an offline profile nothing is known of what another one costs."""
    policy = given.policy
    if not policy.adapts_batch or policy.surrogate is None:
        return total, total
    low = max(policy.min_batch, math.ceil(total / REACH), math.ceil(policy.surrogate.batches[0]), ranks)
    high = min(policy.max_batch, math.floor(total * REACH), math.floor(policy.surrogate.batches[-1]))
    return (low, high) if low <= high else (total, total)


def _device(given: Given, rank: RankProfile, island: int, total: int) -> dict[str, Any]:
    """Step times of a rank: its estimate, else in proportion to the batch. A split that is fixed is given as bounds."""
    curve = curve_of(rank)
    per_sample = rank.compute_s / max(rank.local_batch, 1)
    found: dict[str, Any] = {"q": per_sample, "s": 0.0, "k": 0.0, "m": 0.0}
    if isinstance(curve, SaturationEstimate):
        found = {"alpha": curve.alpha, "beta": curve.beta}
    elif curve is not None:
        found = {"q": curve.q, "s": curve.s, "k": curve.k, "m": curve.m}
    bounds = {"min_batch": least_batch(total, given.world_size)}
    if given.policy.fixed_split:
        bounds = {"min_batch": rank.local_batch, "max_batch": rank.local_batch}
    return found | bounds | {"island": island}


def _surrogate(given: Given) -> dict[str, Any]:
    """What convergence costs; where the rate is not ours to choose, at that rate alone."""
    policy, rate = given.policy, given.current.rate or 0.0
    known = policy.surrogate or PRIOR
    if policy.adapts_rate:
        return {"rates": list(known.rates), "batches": list(known.batches), "extra": [list(row) for row in known.extra]}
    return {"rates": [rate], "batches": list(known.batches), "extra": [[known.at(rate, b) for b in known.batches]]}


def _worth_it(given: Given, ranks: Sequence[RankProfile], now: TtaPlan, planned: Mapping[str, Any]) -> bool:
    errors = [rank.estimate.error if rank.estimate else rank.compute_error_s / rank.compute_s for rank in ranks]
    if planned["tta"] < now.tta * (1 - max(GAIN, 2 * max(errors))):
        return True
    if not given.policy.adapts_rate:
        return False
    sent = (1 - planned["rate"]) / (1 - now.rate)
    same_batches = planned["total_batch"] == now.total_batch
    return same_batches and not 1 / RATE_GAIN < sent < RATE_GAIN


def _predicted(given: Given, ranks: Sequence[RankProfile], now: TtaPlan, planned: Mapping[str, Any]) -> float:
    """With the devices' unsteadiness; a step is not shorter than what its links carry."""

    curves = [curve_of(rank) for rank in ranks]

    def alone(batches: Sequence[int]) -> list[float]:
        return [
            curve.compute_s(batch) if curve else rank.compute_s * batch / max(rank.local_batch, 1)
            for curve, rank, batch in zip(curves, ranks, batches, strict=True)
        ]

    now_s = slowest(ranks, alone(now.batches))
    cost = given.profile.rate_cost
    more_s = cost.kept_s * (now.rate - planned["rate"]) if cost is not None else 0.0
    then_s = max(slowest(ranks, alone(planned["batches"])) + more_s, planned["communication_time"])
    return predicted(given.profile, now_s, then_s)


def _factor(given: Given, total: int) -> float:
    """Without the gradients' noise AdaScale has nothing to go by: the square root lies between its bounds."""
    if given.policy.rule == "none" or not given.policy.initial_batch:
        return 1.0
    return math.sqrt(total / given.policy.initial_batch)


def _reason(given: Given, sight: _Sight, planned: Mapping[str, Any], before: Sequence[int]) -> str:
    """'bandwidth 480 → 95 Mbit/s: rate 97.00 → 99.50 %, batch 137 → 240'."""
    said = []
    if given.policy.adapts_rate:
        said.append(changed("rate", percent(sight.now.rate), percent(planned["rate"]), " %"))
    said.append(changed("batch", sum(before), planned["total_batch"]))
    if list(before) != planned["batches"]:
        said.append(f"local batches {listed(before)} → {listed(planned['batches'])}")
    said.append(f"step {sight.now.step_time:.3g} → {planned['step_time']:.3g} s predicted")
    return f"{_bandwidth(given, sight)}{', '.join(said)}"


def _bandwidth(given: Given, sight: _Sight) -> str:
    """Of the thinnest link, against the one of the last plan that looked at links."""
    if len(set(given.islands)) < 2:
        return ""
    now = mbit(min(sight.data["bandwidths"]) * 8 / USED)
    if given.current.planner != "tta":
        return f"bandwidth {now} Mbit/s: "
    then = mbit(min(json.loads(given.current.input)["bandwidths"]) * 8 / USED)
    return changed("bandwidth", then, now, " Mbit/s: ")
