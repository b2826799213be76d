"""Bound of planned groups: the iteration time if compression were free, as Espresso (Wang, 2023) has it."""

from __future__ import annotations

from itertools import accumulate, pairwise

from atoll.controller.planners.tensor_compression.compression import (
    LINK,
    CompressionInput,
    Option,
    TaskCost,
    TensorTimes,
    plan_compression,
)
from atoll.controller.planners.tensor_compression.tensor_groups import GroupingPlan


def bound_s(given: CompressionInput, plan: GroupingPlan) -> float:
    """Return the shortest iteration that is found for the plan's groups if only links take time."""
    groups = tuple(
        TensorTimes(
            bytes=sum(one.bytes for one in given.tensors[begin:end]),
            backward_s=sum(one.backward_s for one in given.tensors[begin:end]),
        )
        for begin, end in pairwise(accumulate(plan.sizes, initial=0))
    )
    free = tuple(_free_of_computing(option) for option in given.options)
    found = plan_compression(CompressionInput(forward_s=given.forward_s, tensors=groups, options=free))
    return min(found.iteration_time, plan.iteration_time)


def _free_of_computing(option: Option) -> Option:
    tasks = (task if task.on.startswith(LINK) else TaskCost(on=task.on, alpha=0.0, beta=0.0) for task in option.tasks)
    return Option(name=option.name, tasks=tuple(tasks))
