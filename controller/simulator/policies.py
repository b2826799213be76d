"""Policies by name: the controller's own deciding code with different permissions, and baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.deciding.given import Given
from atoll.controller.deciding.next import next_plan
from atoll.controller.planners.batches.water_filling import Bounds
from atoll.controller.simulator.scenario import Scenario
from atoll.controller.simulator.steps import Params
from atoll.controller.state.records import PlanRecord
from atoll.errors import BadInput, NoFeasiblePlan
from atoll.host.documents import did_you_mean
from atoll.strategies import registry
from atoll.strategies.declaration import Strategy, load

MIN_BASELINE_GAIN: Final = 0.02
"""Share of the step's time that a baseline must win, or noise would move its batches."""
LB_BSP_STEP: Final = 5
"""Samples that LB-BSP moves from a rank at most, at each decision."""

Decide = Callable[[Given, Sequence[Bounds], Scenario], PlanRecord | None]
"""Returns the plan that should follow the current one; None while that is good enough or too little is known."""


def _controller(given: Given, bounds: Sequence[Bounds], scenario: Scenario) -> PlanRecord | None:
    try:
        return next_plan(given)
    except NoFeasiblePlan:
        return None


def never(given: Given, bounds: Sequence[Bounds], scenario: Scenario) -> PlanRecord | None:
    """Keep the first plan."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPolicy:
    """what: one line for users. split: "auto" or "inverse-time", as in a job file. batch: whether it may change the
    total batch within the scenario's range; parameters: whether it may change what plans tell the strategy. even:
    whether ranks get equal batches, whatever is known of them. first_params: of the first plan, for the strategy."""

    what: str
    decide: Decide = _controller
    split: str = "auto"
    batch: bool = False
    parameters: bool = False
    even: bool = False
    first_params: Callable[[Scenario], Params] = Scenario.first_params


def lb_bsp(given: Given, bounds: Sequence[Bounds], scenario: Scenario) -> PlanRecord | None:
    """Move samples between ranks as LB-BSP (Chen et al., 2020), in the form that Cannikin compares with.

    At each decision up to LB_BSP_STEP samples move from the slowest rank to the fastest, from the second slowest to the
    second fastest, and so on. A move never overshoots the point where both compute equally long, unlike the original's.
    """
    ranks = given.ranks()
    if ranks is None:
        return None
    times = [rank.compute_s for rank in ranks]
    batches = [round(share) for share in given.current.shares]
    order = sorted(range(len(batches)), key=lambda rank: (times[rank], rank))
    moved = 0
    for fast, slow in zip(order, reversed(order), strict=True):
        if times[slow] <= (1 + MIN_BASELINE_GAIN) * times[fast]:
            break
        slope = times[slow] / batches[slow] + times[fast] / batches[fast]
        count = min(LB_BSP_STEP, round((times[slow] - times[fast]) / slope))
        count = min(count, batches[slow] - bounds[slow].min_batch)
        count = min(count, bounds[fast].ceiling(sum(batches)) - batches[fast])
        if count > 0:
            batches[slow], batches[fast], moved = batches[slow] - count, batches[fast] + count, moved + count
    if not moved:
        return None
    return following(given, batches, "lb-bsp", f"{moved} samples moved from slow to fast ranks")


def following(given: Given, batches: Sequence[int], planner: str, reason: str, predicted_s: float = 0.0) -> PlanRecord:
    """Return a baseline's plan after the current one."""
    return replace(
        given.current,
        id=given.current.id + 1,
        shares=tuple(map(float, batches)),
        planner=planner,
        reason=reason,
        predicted_s=predicted_s,
        learning_rate_factor=0.0,
    )


POLICIES: Final = {
    "even": SimulatedPolicy(what="the same for every rank, for ever", decide=never, even=True),
    "lb-bsp": SimulatedPolicy(
        what="up to five samples from a slow to a fast rank at each decision (Chen et al., 2020)", decide=lb_bsp
    ),
    "inverse-time": SimulatedPolicy(what="shares by time per sample", split="inverse-time"),
    "optperf": SimulatedPolicy(what="the fastest split of a fixed total batch, as the controller decides"),
    "goodput": SimulatedPolicy(what="split and total batch, as the controller decides", batch=True),
    "parameters": SimulatedPolicy(
        what="split, and what plans tell the strategy (sparsity, for one)", parameters=True
    ),
    "parameters-batch": SimulatedPolicy(
        what="split, total batch and what plans tell the strategy, with the least time to accuracy",
        parameters=True,
        batch=True,
    ),
}  # fmt: skip


def of_strategy(strategy: Strategy) -> dict[str, SimulatedPolicy]:
    """Return the strategy's own baselines."""
    return dict(load(strategy.simulator).policies) if strategy.simulator else {}


def chosen(names: Sequence[str], scenario: Scenario) -> list[SimulatedPolicy]:
    """Return the policies of these names. Raises BadInput."""
    known = POLICIES | of_strategy(registry.find(scenario.strategy))
    for name in names:
        if name not in known:
            raise BadInput(f"no policy {name!r}. {did_you_mean(name, known)}")
    return [known[name] for name in names]
