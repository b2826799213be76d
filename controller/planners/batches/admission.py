"""Assess whether a device that offers itself makes a run faster: the time to accuracy with and without it.

A slow peer can cost more than it brings: it takes part in every step with its fixed cost, and every step waits for it.
Both sides are planned in full (total batch and split), so the comparison is of the best of each. Time to accuracy is
proportional to one over goodput, so their ratio needs no loss curve."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from atoll.controller.planners.batches.goodput import GoodputInput, GoodputPlan, plan_goodput
from atoll.controller.planners.batches.optperf import NodeModel, Overlap
from atoll.errors import NoFeasiblePlan
from atoll.planning.schemas import Name, Seconds, Share, Uncertainty

Split = Literal["best", "even"]


class Offer(NodeModel):
    """A device that would join. t_o, t_u: predicted for the whole run with it (its link is part of every
    synchronisation); None: unchanged. uncertainty: relative standard deviation of its times."""

    name: Name
    uncertainty: Uncertainty
    t_o: Seconds | None = None
    t_u: Seconds | None = None


def _named_once(offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    name, times = Counter(offer.name for offer in offers).most_common(1)[0]
    if times > 1:
        raise ValueError(f"name {name!r} twice. Give each device once")
    return offers


class AdmissionInput(GoodputInput):
    """The run and the devices that would join. Each offer costs a plan of the whole run; devices beyond the limit are
    assessed in the next decision.

    uncertainty: relative standard deviation of the run's predicted step time. cost: of admitting any number of devices,
    as a part of the time within which that must pay. split: rule that divides batches."""

    offers: Annotated[tuple[Offer, ...], Field(min_length=1, max_length=64), AfterValidator(_named_once)]
    uncertainty: Uncertainty
    cost: Share = 0.0
    split: Split = "best"


@dataclass(frozen=True, slots=True)
class OfferVerdict:
    """improvement: relative change of the time to accuracy with the device; positive is faster. needed: the improvement
    that it must exceed. None and 0 if no plan with the device exists."""

    name: str
    admitted: bool
    improvement: float | None
    needed: float
    reason: str


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """verdicts: one per offer, in the order of offers. The rest is the plan with the admitted devices: nodes, then
    offers as listed in `admitted`. time_to_accuracy: relative to the run without them."""

    verdicts: tuple[OfferVerdict, ...]
    admitted: tuple[str, ...]
    total_batch: int
    batches: tuple[int, ...]
    step_time: float
    goodput: float
    time_to_accuracy: float


def plan_admission(given: AdmissionInput) -> AdmissionPlan:
    """Assess the offers one by one, the fastest device first, each against the run with those already admitted. Then
    compare all that were admitted with the cost of admitting them.

    Single offers are assessed by batches in fractions of samples: among a hundred nodes one more changes no whole
    batch, fifty do. Raises NoFeasiblePlan if the run without offers has none."""
    run: GoodputInput = given
    before = plan = _plan(run, given.split)
    verdicts: dict[int, OfferVerdict] = {}
    admitted: list[int] = []
    for i in _fastest_first(given.offers, plan):
        offer = given.offers[i]
        larger = run.model_copy(update={"nodes": (*run.nodes, offer), **_slower(given, run, offer)})
        try:
            with_it = _plan(larger, given.split)
        except NoFeasiblePlan as error:
            verdicts[i] = OfferVerdict(offer.name, False, None, 0.0, f"standby: {error}")
            continue
        needed = math.hypot(given.uncertainty, _doubt(larger, with_it, offer, given.split))
        verdicts[i] = _assess(offer, plan, with_it, needed)
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
    """Return the best plan of the run, or the best with equal batches if the split is even."""
    if split == "best":
        return plan_goodput(run)
    each = ({"candidates": (total,), "nodes": _evenly(run.nodes, total)} for total in run.candidates)
    plans = [plan_goodput(run.model_copy(update=changes)) for changes in each]
    return max(plans, key=lambda plan: (plan.goodput, -plan.total_batch))


def _fine(plan: GoodputPlan) -> float:
    """Return the plan's goodput before batches were rounded."""
    return max(c.goodput for c in plan.candidates if c.goodput is not None)


def _evenly(nodes: Sequence[NodeModel], total: int) -> tuple[NodeModel, ...]:
    share, left = divmod(total, len(nodes))
    batches = (share + (i < left) for i in range(len(nodes)))
    return tuple(
        node.model_copy(update={"min_batch": batch, "max_batch": batch})
        for node, batch in zip(nodes, batches, strict=True)
    )


def _doubt(run: GoodputInput, plan: GoodputPlan, offer: Offer, split: Split) -> float:
    """Return the relative slowdown of the run if its last node, the offer, is slower by its uncertainty: a device with
    a small part of the batch makes the run little less sure."""
    slower = 1 + offer.uncertainty
    node = offer.model_copy(update={name: getattr(offer, name) * slower for name in "qskm"})
    return _fine(plan) / _fine(_plan(run.model_copy(update={"nodes": (*run.nodes[:-1], node)}), split)) - 1


def _fastest_first(offers: Sequence[Offer], plan: GoodputPlan) -> list[int]:
    """Order offers by each device's time for an even share of the present batch, so that the order of arrival decides
    nothing."""
    share = plan.total_batch / (len(plan.batches) + 1)

    return sorted(range(len(offers)), key=lambda i: (offers[i].compute_s(share), i))


def _slower(given: AdmissionInput, run: Overlap, offer: Offer) -> dict[str, float]:
    """Return the synchronisation times of a run that already admitted others: no faster than with any of them alone."""
    t_o = given.t_o if offer.t_o is None else offer.t_o
    t_u = given.t_u if offer.t_u is None else offer.t_u
    return {"t_o": max(run.t_o, t_o), "t_u": max(run.t_u, t_u)}


def _assess(offer: Offer, without: GoodputPlan, with_it: GoodputPlan, needed: float) -> OfferVerdict:
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
    return OfferVerdict(offer.name, admitted, improvement, needed, reason)


def _too_dear(verdict: OfferVerdict, count: int, gain: float, cost: float) -> OfferVerdict:
    who = f"{count} devices" if count > 1 else "it"
    gained = f"with {who} the run would take {100 * gain:.1f} % less time"
    reason = f"standby: {gained}, but the restart costs {100 * cost:.1f} %"
    return replace(verdict, admitted=False, reason=reason)
