"""Policies that plan with a model of the run: OptPerf, goodput, AdaptDL's goodput with an even split, rate, TTA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

import numpy as np

from atoll.controller.estimators.saturation import fit_saturation
from atoll.controller.planners.even import EvenInput, split_evenly
from atoll.controller.planners.goodput import GoodputInput, Rule, efficiency, plan_goodput
from atoll.controller.planners.optperf import NodeModel, OptPerfInput, Overlap, plan_optperf, step_times
from atoll.controller.planners.tta import Device, TtaInput, plan_tta
from atoll.controller.planners.wire_bytes import Traffic
from atoll.controller.simulator.policies import GAIN, Choice, Situation, by_inverse_time
from atoll.controller.simulator.rounds import VALUE_BYTES
from atoll.errors import NoFeasiblePlan

RATE_GAIN: Final = 0.05
"""What is kept must change by this part at least before a new rate is worth a plan."""
import os
HEADROOM: Final = float(os.environ.get("HR", "0.75"))
"""Share of the estimated bandwidth that is planned with: all wait where the estimate is too high."""
LARGEST_RATE: Final = 0.999


class OptPerf:
    """Cannikin's split of a fixed total: by time per sample until every node has a model, then `optperf`."""

    splits_evenly = False

    def decide(self, given: Situation) -> Choice | None:
        times = given.measured()
        if times is None:
            return None
        nodes = models(given)
        if nodes is None:
            return by_inverse_time(given, times)
        overlap = known_overlap(given)
        planned = plan_optperf(OptPerfInput(sum(given.current.batches), nodes, overlap))
        now_s = predicted_s(nodes, overlap, given.current.batches)
        if planned.step_time > (1 - GAIN) * now_s:
            return None
        return Choice(
            batches=planned.batches,
            rate=given.current.rate,
            planner="optperf",
            reason=f"step {now_s:.3g} → {planned.step_time:.3g} s predicted",
            predicted_s=planned.step_time,
        )


class Goodput:
    """Total batch and split with the highest goodput; OptPerf's split until the noise scale is known."""

    splits_evenly = False

    def __init__(self) -> None:
        self._split = OptPerf()

    def decide(self, given: Situation) -> Choice | None:
        nodes, noise = models(given), given.profile.noise
        if given.measured() is None:
            return None
        if nodes is None or noise is None:
            return self._split.decide(given)
        overlap = known_overlap(given)
        planned = plan_goodput(goodput_input(given, nodes, overlap, noise.noise_scale))
        total = sum(given.current.batches)
        worth = efficiency(noise.noise_scale, given.initial_batch, total)
        now_s = predicted_s(nodes, overlap, given.current.batches)
        if planned.goodput < (1 + GAIN) * worth * total / now_s:
            return None
        return Choice(
            batches=planned.batches,
            rate=given.current.rate,
            planner="goodput",
            reason=f"noise scale {noise.noise_scale:.3g}: batch {total} → {planned.total_batch}",
            predicted_s=planned.step_time,
        )


class AdaptDl:
    """Goodput as AdaptDL has it: one model for all nodes, fitted to steps that the slowest sets; an even split."""

    splits_evenly = True

    def decide(self, given: Situation) -> Choice | None:
        times, nodes, noise = given.measured(), models(given), given.profile.noise
        if times is None or noise is None:
            return None
        if nodes is None:
            return self._second_total(given)
        overlap = known_overlap(given)
        share = sum(given.current.batches) / len(nodes)
        slowest = max(nodes, key=lambda n: (n.q + n.k) * share + n.s + n.m)
        alike = tuple(replace(slowest, bounds=node.bounds) for node in nodes)
        planned = plan_goodput(goodput_input(given, alike, overlap, noise.noise_scale))
        total = sum(given.current.batches)
        now_s = predicted_s(alike, overlap, given.current.batches)
        if planned.goodput < (1 + GAIN) * efficiency(noise.noise_scale, given.initial_batch, total) * total / now_s:
            return None
        return Choice(
            batches=split_evenly(EvenInput(planned.total_batch, given.bounds)).batches,
            rate=given.current.rate,
            planner="adaptdl",
            reason=f"noise scale {noise.noise_scale:.3g}: batch {total} → {planned.total_batch}",
            predicted_s=predicted_s(alike, overlap, planned.batches),
        )

    @staticmethod
    def _second_total(given: Situation) -> Choice | None:
        """A model needs two batches: the next larger candidate is the second."""
        larger = [total for total in given.candidates if total >= 1.25 * sum(given.current.batches)]
        if not larger:
            return None
        batches = split_evenly(EvenInput(larger[0], given.bounds)).batches
        return Choice(
            batches=batches, rate=given.current.rate, planner="adaptdl", reason="a second batch to learn from"
        )


class RateOnly:
    """Strategy stale-sparse with a fixed total batch: the least rate that the links carry within a step."""

    splits_evenly = False

    def decide(self, given: Situation) -> Choice | None:
        times = given.measured()
        if times is None:
            return None
        if (split := by_inverse_time(given, times)) is not None:
            return split
        if (traffic := known_traffic(given)) is None:
            return None
        rate = min(1 - traffic.kept_within(max(times)), LARGEST_RATE)
        if given.surrogate is not None:
            rate = max(rate, given.surrogate.rates[0])
        if abs((1 - rate) / (1 - given.current.rate) - 1) < RATE_GAIN:
            return None
        return replace(
            given.current,
            rate=rate,
            planner="rate",
            reason=f"rate {100 * given.current.rate:.2f} → {100 * rate:.2f} %",
            predicted_s=max(*times, traffic.seconds(1 - rate)),
        )


class RateAndBatch:
    """Strategy stale-sparse: rate, total batch and split with the least time to accuracy (`tta`)."""

    splits_evenly = False

    def decide(self, given: Situation) -> Choice | None:
        times = given.measured()
        if times is None:
            return None
        devices, traffic = saturating(given), known_traffic(given)
        if devices is None or traffic is None or given.surrogate is None:
            return by_inverse_time(given, times)
        asked = TtaInput(
            devices, tuple(traffic.bandwidth_J.tolist()), given.entries, given.surrogate, max(1, round(given.samples))
        )
        try:
            planned = plan_tta(asked)
        except NoFeasiblePlan:
            return None
        now_s = max(*times, traffic.seconds(1 - given.current.rate))
        total = sum(given.current.batches)
        now_tta = given.samples * (1 + given.surrogate.at(given.current.rate, total)) * now_s / total
        if planned.tta > (1 - GAIN) * now_tta:
            return None
        return Choice(
            batches=planned.batches,
            rate=planned.rate,
            planner="tta",
            reason=f"rate {100 * given.current.rate:.2f} → {100 * planned.rate:.2f} %, "
            f"batch {total} → {planned.total_batch}",
            predicted_s=max(planned.step_time, planned.communication_time),
        )


def models(given: Situation) -> tuple[NodeModel, ...] | None:
    """None before every rank has one."""
    found = []
    for rank, bounds in enumerate(given.bounds):
        known = given.profile.ranks.get(rank)
        if known is None or known.estimate is None or not known.estimate.q + known.estimate.k > 0:
            return None
        estimate = known.estimate
        found.append(NodeModel(estimate.q, estimate.s, estimate.k, estimate.m, bounds))
    return tuple(found)


def known_overlap(given: Situation) -> Overlap:
    """No synchronisation at all where none was seen."""
    overlap = given.profile.overlap
    return Overlap(0.0, 0.0, 0.0) if overlap is None else Overlap(overlap.gamma, overlap.t_o, overlap.t_u)


def known_traffic(given: Situation) -> Traffic | None:
    """None before every island's link was measured."""
    islands = sorted(set(given.islands))
    links = [given.profile.links.get(island) for island in islands]
    if len(islands) < 2 or any(link is None for link in links):
        return None
    part_J = np.array([given.islands.count(island) for island in islands], dtype=np.float64) / len(given.islands)
    bandwidth_J = np.array([HEADROOM * link.bandwidth_bps / 8 for link in links if link is not None])
    return Traffic(given.entries, VALUE_BYTES, part_J, bandwidth_J)


def predicted_s(nodes: Sequence[NodeModel], overlap: Overlap, batches: Sequence[int]) -> float:
    return float(step_times(nodes, overlap).at(np.array(batches, dtype=np.float64)).max())


def goodput_input(given: Situation, nodes: tuple[NodeModel, ...], overlap: Overlap, noise_scale: float) -> GoodputInput:
    rule = cast(Rule, given.rule)
    return GoodputInput(given.candidates, nodes, overlap, noise_scale, given.initial_batch, rule)


def saturating(given: Situation) -> tuple[Device, ...] | None:
    """Eq. 2 of StellaTrain (2024) for every rank; None before each has seen two batches."""
    islands = sorted(set(given.islands))
    found = []
    for rank, bounds in enumerate(given.bounds):
        known = given.profile.ranks.get(rank)
        fitted = fit_saturation(known.points) if known is not None else None
        if fitted is None:
            return None
        found.append(Device(fitted.alpha, fitted.beta, islands.index(given.islands[rank]), bounds))
    return tuple(found)
