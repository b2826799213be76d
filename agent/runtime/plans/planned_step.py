"""The part of a plan that holds in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from atoll.strategies.declaration import PlanParameters, Strategy
from atoll.v1.common_pb2 import Plan


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The part of one plan that a step needs. Ranks that train the same step have the same."""

    shares: tuple[float, ...]  # one per rank, relative
    params: PlanParameters = field(default_factory=PlanParameters)  # of the strategy
    total_batch: int = 0  # samples of a step of all ranks; 0: as the script gave it
    learning_rate_factor: float = 1.0  # times the rates that the script and its schedulers set
    passes: int = 1  # in which each rank trains its part of the batch


def planned_from_wire(plan: Plan, strategy: Strategy) -> PlannedStep:
    """PlanSchedule checks the rest. Raises BadInput for parameters that are not the strategy's."""
    return PlannedStep(
        shares=tuple(plan.shares),
        params=strategy.read_plan_parameters(plan.strategy_params, f"plan {plan.id}: strategy_params"),
        total_batch=plan.total_batch,
        learning_rate_factor=plan.learning_rate_factor or 1.0,
        passes=max(plan.passes, 1),
    )


def why_refused(planned: PlannedStep, world_size: int, samples: int | None) -> str | None:
    """Return why this run cannot train such a step; None if it can. Reads only facts equal on all ranks.

    samples: of the dataset; None where that does not matter."""
    total, factor = planned.total_batch, planned.learning_rate_factor
    if total and total < world_size:
        return f"its total batch of {total} is less than a sample for each of the {world_size} workers"
    if total and samples is not None and total > samples:
        return f"its total batch of {total} is more than the dataset's {samples} samples"
    if not (factor > 0 and math.isfinite(factor)):  # "not >", so that NaN is refused too
        return f"its factor of the learning rate is {factor}; it must be finite and above 0"
    return None
