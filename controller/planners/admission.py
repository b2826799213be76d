"""Whether a device that offers itself makes a run faster: the time to accuracy with it against the one without.

A slow peer can cost more than it brings: it takes part in every step with its fixed cost, and every step waits for
it. Both sides are planned in full (total batch and split), so what is compared is the best of each. Time to accuracy
goes with one over goodput, so their ratio needs no loss curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atoll.controller.planners.bounds import Bounds
from atoll.controller.planners.goodput import GoodputInput, GoodputPlan, plan_goodput
from atoll.controller.planners.optperf import NodeModel, Overlap
from atoll.errors import NoFeasiblePlan

Split = Literal["best", "even"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A device that would join. overlap: of the whole run, as predicted with it (its link is part of every
    synchronisation). uncertainty: relative standard deviation of its times."""

    name: str
    node: NodeModel
    overlap: Overlap
    uncertainty: float


@dataclass(frozen=True, slots=True)
class AdmissionInput:
    """run: the run as it is. uncertainty: relative standard deviation of its predicted step time. cost: of taking
    devices in, however many, as a part of the time within which that has to pay. split: how batches are shared out."""

    run: GoodputInput
    offers: tuple[Offer, ...]
    uncertainty: float
    cost: float = 0.0
    split: Split = "best"


@dataclass(frozen=True, slots=True)
class Verdict:
    """improvement: relative change of the time to accuracy that the device was judged by, > 0 is faster. needed: what
    it has to exceed. None and 0 where no plan with the device exists."""

    name: str
    admitted: bool
    improvement: float | None
    needed: float
    reason: str


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """verdicts: one per offer, in the order they were made. The rest is the plan with those admitted, in the order of
    nodes, then admitted offers as they are listed in `admitted`. time_to_accuracy: relative to the run as it is."""

    verdicts: tuple[Verdict, ...]
    admitted: tuple[str, ...]
    total_batch: int
    batches: tuple[int, ...]
    step_time: float
    goodput: float
    time_to_accuracy: float


def plan_admission(given: AdmissionInput) -> AdmissionPlan:
    """Judge the offers one by one, the fastest device first, each against the run with those already admitted; then
    all that were admitted together against the cost of taking them in.

    One by one by batches in fractions of samples: among a hundred nodes one more changes no whole batch, fifty do.
    Raises NoFeasiblePlan where the run as it is has none.
    """
    run = given.run
    before = plan = _plan(run, given.split)
    verdicts: dict[int, Verdict] = {}
    admitted: list[int] = []
    for i in _fastest_first(given.offers, plan):
        offer = given.offers[i]
        larger = replace(run, nodes=(*run.nodes, offer.node), overlap=_slower(run.overlap, offer.overlap))
        try:
            with_it = _plan(larger, given.split)
        except NoFeasiblePlan as error:
            verdicts[i] = Verdict(offer.name, False, None, 0.0, f"standby: {error}")
            continue
        needed = math.hypot(given.uncertainty, _doubt(larger, with_it, offer, given.split))
        verdicts[i] = _judge(offer, plan, with_it, needed)
        if verdicts[i].admitted:
            run, plan = larger, with_it
            admitted.append(i)
    gain = 1 - before.goodput / plan.goodput
    if admitted and gain <= given.cost:
        for i in admitted:
            verdicts[i] = _too_dear(verdicts[i], len(admitted), gain, given.cost)
        plan, admitted = before, []
    return AdmissionPlan(
        tuple(verdicts[i] for i in range(len(given.offers))),
        tuple(given.offers[i].name for i in admitted),
        plan.total_batch,
        plan.batches,
        plan.step_time,
        plan.goodput,
        before.goodput / plan.goodput,
    )


def _plan(run: GoodputInput, split: Split) -> GoodputPlan:
    """The best plan of the run; of those with equal batches, where it shares them out evenly."""
    if split == "best":
        return plan_goodput(run)
    plans = [plan_goodput(replace(run, candidates=(c,), nodes=_evenly(run.nodes, c))) for c in run.candidates]
    return max(plans, key=lambda plan: (plan.goodput, -plan.total_batch))


def _fine(plan: GoodputPlan) -> float:
    """Its goodput before batches were rounded."""
    return max(c.goodput for c in plan.candidates if c.goodput is not None)


def _evenly(nodes: Sequence[NodeModel], total: int) -> tuple[NodeModel, ...]:
    share, left = divmod(total, len(nodes))
    return tuple(replace(n, bounds=Bounds(share + (i < left), share + (i < left))) for i, n in enumerate(nodes))


def _doubt(run: GoodputInput, plan: GoodputPlan, offer: Offer, split: Split) -> float:
    """How much longer the run, whose last node is the offer, takes if that is slower than predicted by its
    uncertainty: a device that gets a small part of the batch makes the run little less sure."""
    slower, node = 1 + offer.uncertainty, run.nodes[-1]
    node = replace(node, q=node.q * slower, s=node.s * slower, k=node.k * slower, m=node.m * slower)
    return _fine(plan) / _fine(_plan(replace(run, nodes=(*run.nodes[:-1], node)), split)) - 1


def _fastest_first(offers: Sequence[Offer], plan: GoodputPlan) -> list[int]:
    """By each device's time for an even share of the present batch, so that the order of arrival decides nothing."""
    share = plan.total_batch / (len(plan.batches) + 1)

    def share_s(i: int) -> float:
        node = offers[i].node
        return (node.q + node.k) * share + node.s + node.m

    return sorted(range(len(offers)), key=lambda i: (share_s(i), i))


def _slower(run: Overlap, offer: Overlap) -> Overlap:
    """The synchronisation of a run that already admitted others: no faster than with any of them alone."""
    return Overlap(max(run.gamma, offer.gamma), max(run.t_o, offer.t_o), max(run.t_u, offer.t_u))


def _judge(offer: Offer, without: GoodputPlan, with_it: GoodputPlan, needed: float) -> Verdict:
    improvement = 1 - _fine(without) / _fine(with_it)
    admitted = improvement > needed
    step = f"step {without.step_time:.3g} → {with_it.step_time:.3g} s"
    batch = f"batch {without.total_batch} → {with_it.total_batch}, {with_it.batches[-1]} of it here"
    if improvement <= 0:
        why = f"the run would take {abs(100 * improvement):.1f} % longer"
    elif not admitted:
        why = f"the run would take {100 * improvement:.1f} % less time, within the uncertainty of {100 * needed:.1f} %"
    else:
        why = f"the run takes {100 * improvement:.1f} % less time, more than the uncertainty of {100 * needed:.1f} %"
    reason = f"{'admitted' if admitted else 'standby'}: {why} ({step}; {batch})"
    return Verdict(offer.name, admitted, improvement, needed, reason)


def _too_dear(verdict: Verdict, count: int, gain: float, cost: float) -> Verdict:
    who = f"{count} devices" if count > 1 else "it"
    gained = f"with {who} the run would take {100 * gain:.1f} % less time"
    reason = f"standby: {gained}, but the restart costs {100 * cost:.1f} %"
    return replace(verdict, admitted=False, reason=reason)
