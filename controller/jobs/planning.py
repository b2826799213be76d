"""When a run gets a new plan, and which. Pure; the planner's input and output are recorded with every plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.planners.registry import PLANNERS, canonical
from atoll.controller.state.records import PlanRecord

GAIN: Final = 0.05
"""A new plan must be predicted to shorten the step by this part at least, and by two standard errors of what was
measured, or noise would move batches."""
MIN_INTERVAL_S: Final = 2.0
LEAD_STEPS: Final = 5
NOMINAL_BATCH: Final = 1000
"""Stands in for the total batch before the script has told it; only the shares' ratios count then."""
_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """A rank's seconds per sample with their standard error, the plan they were measured under, and its local batch
    under that plan."""

    seconds_per_sample: float
    plan: int
    local_batch: int
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs and what its agent was told of the device's speed (1.0 = full)."""

    node: str
    device: int
    speed: float

    @property
    def name(self) -> str:
        return f"{self.node}/{self.device}"


def first_plan(
    run: int, split: str, places: Sequence[Place], learned: Mapping[str, float], total_batch: int
) -> PlanRecord:
    """The plan a run starts with, from what was learned of its devices in earlier runs, else from their set speeds.

    learned: seconds per sample by "node/device". total_batch: 0 where no earlier run told it.
    """
    if split == "even":
        return _even(run, len(places), total_batch)
    if all(place.name in learned for place in places):
        times, why = [learned[place.name] for place in places], "speeds learned in earlier runs"
    else:
        times, why = [0.001 / place.speed for place in places], "set speeds of the devices; none are measured yet"
    if len(set(times)) == 1:
        return _even(run, len(places), total_batch)
    text = _input(total_batch or NOMINAL_BATCH, times)
    output = PLANNERS["inverse-time"].run_json(text)
    planned = json.loads(output)
    shares = planned["batches"] if total_batch >= len(places) else planned["continuous"]
    return PlanRecord(
        run=run,
        id=1,
        from_step=0,
        shares=tuple(float(share) for share in shares),
        planner="inverse-time",
        reason=f"{why}: {_ratios(times)}",
        input=text,
        output=output,
    )


def next_plan(
    *,
    now_s: float,
    planned_s: float,
    split: str,
    current: PlanRecord,
    speeds: Mapping[int, RankSpeed],
    total_batch: int,
    newest_step: int,
) -> PlanRecord | None:
    """The plan that should follow `current`, or None while it is good enough or too little is known.

    speeds: by rank, of those that have an estimate. planned_s: when the last plan was issued (monotonic).
    """
    ranks = range(len(current.shares))
    if split == "even" or len(ranks) < 2 or now_s < planned_s + MIN_INTERVAL_S or total_batch < len(ranks):
        return None
    if any(rank not in speeds or speeds[rank].plan != current.id for rank in ranks):
        return None
    times = [speeds[rank].seconds_per_sample for rank in ranks]
    before = [speeds[rank].local_batch for rank in ranks]
    text = _input(total_batch, times)
    output = PLANNERS["inverse-time"].run_json(text)
    planned = json.loads(output)
    old_s = max(batch * t for batch, t in zip(before, times, strict=True))
    new_s: float = planned["step_time"]
    doubt_s = 2 * max(batch * speeds[rank].error for rank, batch in enumerate(before))
    if not new_s < old_s - max(GAIN * old_s, doubt_s) or _won_nothing(current, old_s):
        return None
    reason = (
        f"device speeds {_ratios(times)}: local batches {_list(before)} → {_list(planned['batches'])}, "
        f"step {old_s:.3g} → {new_s:.3g} s predicted"
    )
    return PlanRecord(
        run=current.run,
        id=current.id + 1,
        from_step=newest_step + LEAD_STEPS,
        shares=tuple(float(batch) for batch in planned["batches"]),
        planner="inverse-time",
        reason=reason,
        input=text,
        output=output,
        measured_s=old_s,
        rate=current.rate,
    )


def adjusted_plan(current: PlanRecord, rate: float, from_step: int) -> PlanRecord:
    """The plan that follows `current` with its shares, so also its planner, and another compression rate.

    current: of a run that has a rate."""
    reason = f"rate {percent(current.rate or 0.0)} -> {percent(rate)} % (asked by a user)"
    return replace(current, id=current.id + 1, from_step=from_step, rate=rate, reason=reason)


def percent(share: float) -> str:
    """'99.50'."""
    return f"{100 * share:.2f}"


def _won_nothing(current: PlanRecord, measured_s: float) -> bool:
    """Whether `current` left the step as long as it was: then time does not follow the batch (a fixed cost rules), and
    more of the same would only starve the slower ranks. A step that became much longer is another matter."""
    return current.measured_s * (1 - GAIN / 2) < measured_s < current.measured_s * (1 + 2 * GAIN)


def _even(run: int, ranks: int, total_batch: int) -> PlanRecord:
    text = canonical({"nodes": ranks, "total_batch": max(total_batch, ranks)})
    output = PLANNERS["even"].run_json(text)
    shares = tuple(float(batch) for batch in json.loads(output)["batches"])
    reason = "one worker" if ranks == 1 else f"the same for all {ranks} workers"
    return PlanRecord(
        run=run, id=1, from_step=0, shares=shares, planner="even", reason=reason, input=text, output=output
    )


def _input(total_batch: int, times: Sequence[float]) -> str:
    # Every rank gets a sample: an idle rank would never be measured again.
    low = 1 if total_batch >= len(times) else 0
    nodes = [{"min_batch": low, "seconds_per_sample": t} for t in times]
    return canonical({"nodes": nodes, "total_batch": total_batch})


def _ratios(times: Sequence[float]) -> str:
    fastest = min(times)
    shown = " : ".join(f"{fastest / t:.2f}" for t in times[:_SHOWN])
    return shown + (f" : … ({len(times)} ranks)" if len(times) > _SHOWN else "")


def _list(batches: Sequence[int]) -> str:
    return "/".join(map(str, batches[:_SHOWN])) + ("/…" if len(batches) > _SHOWN else "")
