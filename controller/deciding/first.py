"""Makes the plan that a run begins with, and the plans that a user asks for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from atoll.controller.deciding.words import changed, listed, ratios
from atoll.controller.planners.batches.splits import EvenInput, InverseTimeInput, InverseTimePlan, TimedNode
from atoll.controller.planners.batches.water_filling import Bounds
from atoll.controller.planners.registry import EVEN, INVERSE_TIME, Decision
from atoll.controller.state.records import DeviceMemory, JobPins, PlanRecord

MAX_EQUAL_RATIO: Final = 1.2
"""Largest ratio of times that counts as equal: a benchmark of a fraction of a second cannot tell more."""


@dataclass(frozen=True, slots=True)
class Place:
    """Device of a rank. speed: as set for its agent, 1.0 = full. work_per_s: measured on a fixed calculation, 0 if not
    measured. memory: what the job knows of its memory, None if it has not trained there."""

    node: str
    device: int
    speed: float
    work_per_s: float = 0.0
    memory: DeviceMemory | None = None

    @property
    def max_batch(self) -> int:
        """Return the most samples that its memory holds, 0 if that is not known."""
        return self.memory.max_batch if self.memory else 0

    @property
    def name(self) -> str:
        return f"{self.node}/{self.device}"


def first_plan(
    run: int, split: str, places: Sequence[Place], learned: Mapping[str, float], total_batch: int
) -> PlanRecord:
    """Return a run's first plan, from its devices' speeds in earlier runs, else from their set speeds.

    A device whose memory is not known gets no more than the even share. learned: seconds per sample by "node/device".
    total_batch: 0 if no earlier run reported it.
    """
    if not total_batch:
        return _even(run, places, 0, (), 1)
    bounds, passes = memory_bounds(places, learned, total_batch)
    times, why = _times(places, learned)
    if split == "even" or max(times) <= MAX_EQUAL_RATIO * min(times):
        return _even(run, places, total_batch, bounds, passes)
    decision = by_time(times, total_batch, bounds)
    shares = decision.plan.batches if total_batch >= len(places) else decision.plan.continuous
    reason = f"{why}: {ratios(times)}{_bound_by_memory(places, shares, passes)}"
    return replace(first_record(run, shares, decision, reason), passes=passes)


def memory_bounds(places: Sequence[Place], learned: Collection[str], total_batch: int) -> tuple[list[int], int]:
    """Return the most samples of each device in a step, and the passes in which it trains them.

    A pass has no more than what memory holds; where that is not known, no more than the even share or what the device
    trained. learned: devices whose speed is known. If all together hold less than the batch in one pass, they make so
    many that they do."""
    even = math.ceil(total_batch / len(places))
    held = []
    for place in places:
        trained = place.memory.trained if place.memory else total_batch if place.name in learned else 0
        held.append(place.max_batch or max(even, trained))
    passes = math.ceil(total_batch / sum(held))
    return [passes * most for most in held], passes


def _bound_by_memory(places: Sequence[Place], shares: Sequence[float], passes: int) -> str:
    """Name the devices whose share is what their memory holds; empty if there is none."""
    both = zip(places, shares, strict=True)
    bound = [place.name for place, share in both if 0 < passes * place.max_batch <= share]
    of_memory = f"; the memory of {', '.join(bound[:4])} bounds its share" if bound else ""
    return of_memory + (f"; each part of a batch in {passes} passes, as memory holds no more" if passes > 1 else "")


def first_record(run: int, shares: Sequence[float], decision: Decision[Any, Any], reason: str) -> PlanRecord:
    """Return a run's first plan with these shares, as its planner decided."""
    return PlanRecord(
        run=run,
        id=1,
        from_step=0,
        shares=tuple(map(float, shares)),
        planner=decision.planner.name,
        reason=reason,
        input=decision.input,
        output=decision.output,
    )


def _times(places: Sequence[Place], learned: Mapping[str, float]) -> tuple[list[float], str]:
    """Return seconds per sample of each, as far as they are known, and their source in words."""
    if all(place.name in learned for place in places):
        return [learned[place.name] for place in places], "speeds learned in earlier runs"
    known = [place for place in places if place.name in learned and place.work_per_s]
    if all(place.work_per_s for place in places):
        # A sample is so much work; without a device that trained any, every sample is the same.
        work = statistics.median(learned[p.name] * p.work_per_s for p in known) if known else 1.0
        why = "speeds learned in earlier runs, new devices by their benchmark" if known else "the devices' benchmarks"
        return [learned.get(place.name, work / place.work_per_s) for place in places], why
    return [0.001 / place.speed for place in places], "set speeds of the devices; none are measured yet"


def least_batch(total_batch: int, ranks: int) -> int:
    """Return the least batch of a rank: 1 if there are enough samples, as an idle rank is never measured again."""
    return 1 if total_batch >= ranks else 0


def by_time(
    times: Sequence[float], total_batch: int, max_batches: Sequence[int] = ()
) -> Decision[InverseTimeInput, InverseTimePlan]:
    """Split the batch by speed. times: seconds per sample, by rank. max_batches: 0 or left out: not bounded."""
    low = least_batch(total_batch, len(times))
    nodes = tuple(
        TimedNode.of_measured(min_batch=low, seconds_per_sample=time_s, **bound_of(high, low))
        for time_s, high in zip(times, max_batches or [0] * len(times), strict=True)
    )
    return INVERSE_TIME.decide(InverseTimeInput(total_batch=total_batch, nodes=nodes))


def bound_of(max_batch: int, min_batch: int = 0) -> dict[str, int]:
    """Return a planner's fields for the most samples of a node; none where it is 0, which is not bounded."""
    return {"max_batch": max(max_batch, min_batch)} if max_batch else {}


def _even(run: int, places: Sequence[Place], total_batch: int, bounds: Sequence[int], passes: int) -> PlanRecord:
    """bounds, passes: the result of `memory_bounds`, empty and 1 if the total batch is not known."""
    ranks, total = len(places), max(total_batch, len(places))
    nodes: int | tuple[Bounds, ...] = ranks
    even = math.ceil(total / ranks)
    if any(high < even for high in bounds):
        nodes = tuple(Bounds(max_batch=high) for high in bounds)
    decision = EVEN.decide(EvenInput(total_batch=total, nodes=nodes))
    batches = decision.plan.batches
    reason = "one worker" if ranks == 1 else f"equal batches for all {ranks} workers"
    if not isinstance(nodes, int):
        reason = "as equal as memory allows"
    reason += _bound_by_memory(places, batches, passes) if nodes != ranks or passes > 1 else ""
    return replace(first_record(run, batches, decision, reason), passes=passes)


def pinned_plan(
    current: PlanRecord, pins: JobPins, from_step: int, *, adapts: bool = False, by: str = "a user"
) -> PlanRecord | None:
    """Return the plan after `current` with the user's pins; None if it has them all already.

    adapts: the controller may choose the total batch. If it may not, a total batch that is unpinned ends. by: the
    user."""
    changes, asked = [], current
    for name, value in pins.strategy_params.items():
        if value != (before := current.strategy_params.get(name)):
            changes.append(changed(name, before, value))
            asked = replace(asked, strategy_params={**asked.strategy_params, name: value})
    if pins.total_batch and pins.total_batch != current.total_batch:
        changes.append(changed("batch", current.total_batch or "of the script", pins.total_batch))
        asked = replace(asked, total_batch=pins.total_batch, shares=_scaled(asked.shares, pins.total_batch))
    if current.total_batch and not pins.total_batch and not adapts:
        changes.append(changed("batch", current.total_batch, "of the script"))
        asked = replace(asked, total_batch=0, learning_rate_factor=0.0)
    if pins.shares and pins.shares != current.shares:
        changes.append(f"shares {listed([round(100 * s / sum(pins.shares)) for s in pins.shares])} %")
        asked = replace(asked, shares=pins.shares)
    if not changes:
        return None
    # The planner's input stays that of the last decision: pins are derived from nothing.
    reason = f"{', '.join(changes)} (asked by {by})"
    return replace(asked, id=current.id + 1, from_step=from_step, reason=reason, predicted_s=0.0)


def _scaled(shares: Sequence[float], total: int) -> tuple[float, ...]:
    return tuple(share * total / sum(shares) for share in shares)
