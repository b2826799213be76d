"""The input of a decision: the state of a run, and the limits of what may be decided about it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from atoll.controller.estimators.profile import Profile
from atoll.controller.estimators.run import StepEstimator
from atoll.controller.planners.registry import Decision
from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.controller.state.records import JobPins, PlanRecord
from atoll.step_estimators.estimates import RankProfile
from atoll.strategies import registry
from atoll.strategies.declaration import load

MIN_GAIN: Final = 0.05
"""Least share by which a new plan must promise to shorten the step. It must also exceed two standard errors of what was
measured, or noise would move batches."""
MIN_INTERVAL_S: Final = 2.0
"""Least time between two plans of a run, in seconds."""
MAX_LEAD_STEPS: Final = 5
DELIVERY_S: Final = 1.0
"""Time by which all workers have a plan, in seconds. They agree on its first step in any case."""
MAX_BATCH_CHANGE: Final = 2.0
"""Largest factor by which a plan changes the total batch: predictions far from what was measured are not trusted."""


def lead_steps(step_s: float) -> int:
    """Return how many steps after the newest reported one a plan begins; the most if no step was timed yet.

    Two are enough for long steps, and each further one runs under a plan that no longer fits."""
    return min(2 + int(DELIVERY_S / step_s), MAX_LEAD_STEPS) if step_s > 0 else MAX_LEAD_STEPS


class ControllerHalf(Protocol):
    """Made from a strategy's settings. Pure: time is an argument."""

    def estimator(self) -> StepEstimator | None:
        """Make the estimator of one run's steps for what only this strategy needs; None if it needs nothing."""
        ...

    def next_plan(self, given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
        """Return the plan after the present one; None if only the split of the batch is to be decided.

        ranks: all ranks, as measured under the present plan. Raises NoFeasiblePlan."""
        ...


def controller_half(strategy: str, settings: Mapping[str, Any]) -> ControllerHalf | None:
    """Make a strategy's controller half, None if it has none. settings: as recorded."""
    declared = registry.find(strategy)
    if not declared.controller:
        return None
    half: ControllerHalf = load(declared.controller)(declared.settings.model_validate(dict(settings)))
    return half


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of the decisions about a job.

    half: the strategy's controller half, None if it has none. adapts: the strategy's plan parameters that may change.
    min_batch, max_batch: range of the total batch, both 0 if it is fixed. rule: of the learning rate, "adascale",
    "square-root" or "none". initial_batch: the script's own total batch, 0 until it is known. batches_per_update:
    batches that each update adds up. surrogate: of the offline profile, None if there is none."""

    split: str = "auto"
    half: ControllerHalf | None = None
    adapts: Collection[str] = ()
    min_batch: int = 0
    max_batch: int = 0
    rule: str = "adascale"
    initial_batch: int = 0
    batches_per_update: int = 1
    surrogate: Surrogate | None = None
    pins: JobPins = field(default_factory=JobPins)

    @property
    def adapts_batch(self) -> bool:
        return bool(self.max_batch) and not self.pins.total_batch and not self.fixed_split

    def may_change(self, parameter: str) -> bool:
        """Return whether decisions may change this plan parameter of the strategy."""
        return parameter in self.adapts and parameter not in self.pins.strategy_params

    @property
    def fixed_split(self) -> bool:
        return self.split == "even" or bool(self.pins.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """State of one run. now_s, planned_s: monotonic clock; `current` was issued at planned_s. islands: by rank, empty
    if there is only one. max_batches: samples of a step that the memory of each rank's device holds, in the passes
    of the present plan, by rank; 0 where nothing bounds them, empty if nothing bounds any."""

    now_s: float
    planned_s: float
    current: PlanRecord
    profile: Profile
    policy: Policy
    islands: tuple[str, ...] = ()
    max_batches: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.current.shares)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Return max_batches, one for each rank."""
        return self.max_batches or (0,) * self.world_size

    @property
    def most_samples(self) -> float:
        """Return the largest total batch that all devices together hold; infinite if one is not bounded."""
        return sum(self.bounds) if all(self.bounds) else math.inf

    def bound_in_words(self, batches: Sequence[int]) -> str:
        """Name the ranks whose batch is what their memory holds; empty if there is none."""
        bound = [rank for rank, (high, batch) in enumerate(zip(self.bounds, batches, strict=True)) if 0 < high <= batch]
        return f"; memory bounds the share of rank {', '.join(map(str, bound[:8]))}" if bound else ""

    def ranks(self) -> list[RankProfile] | None:
        """Return all ranks as measured under the present plan, None while one is not measured."""
        found: Mapping[int, RankProfile] = self.profile.ranks
        ranks = [found[rank] for rank in range(self.world_size) if rank in found]
        if len(ranks) < self.world_size or any(rank.plan != self.current.id for rank in ranks):
            return None
        return ranks


def plan_after(given: Given, decision: Decision[Any, Any], **changes: Any) -> PlanRecord:
    """Make the plan after the present one, as its planner decided, with `changes` of fields."""
    current = given.current
    return replace(
        current,
        id=current.id + 1,
        from_step=given.profile.newest_step + lead_steps(given.profile.step_s),
        planner=decision.planner.name,
        input=decision.input,
        output=decision.output,
        **changes,
    )
