"""Chooses for each tensor whether it is compressed, where, and how it is sent.

Source: Espresso (Wang, 2023), chapter 4: F(S), the iteration time by a simulated timeline, and the search for a short
one. The timeline and the search are `atoll.kernels.timeline`; options come as chains of tasks, so what can be chosen
is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, field_validator

from atoll.controller.planners.schemas import Name, Schema, Seconds
from atoll.kernels.timeline import DEVICE, Timeline

MAX_TENSORS: Final = 10_000
MAX_OPTIONS: Final = 256
MAX_TASKS: Final = 64
DEVICE_NAME: Final = "gpu"
LINK: Final = "link"
"""What the names of links begin with."""

TASKS_SEARCHED: Final = 2_500_000
TASKS_SEARCHED_FREE: Final = 500_000
"""Simulated at most, by the search and by that of the bound: some 50 ms of one core together."""

SecondsPerByte = Annotated[float, Field(ge=0, le=1)]
TensorBytes = Annotated[int, Field(ge=0, le=2**50)]


class TensorTimes(Schema):
    """A tensor of the model. bytes: of its gradient, uncompressed. backward_s: of its share of the backward pass."""

    bytes: TensorBytes
    backward_s: Seconds


Tensors = Annotated[tuple[TensorTimes, ...], Field(min_length=1, max_length=MAX_TENSORS)]


class TaskCost(Schema):
    """What one task takes on the resource `on`: alpha + beta * bytes * factor seconds."""

    on: Name
    alpha: Seconds
    beta: SecondsPerByte
    factor: Annotated[float, Field(ge=0, le=1e6)] = 1.0


class Option(Schema):
    """One way to synchronise a tensor: its tasks, one after the other."""

    name: Name
    tasks: Annotated[tuple[TaskCost, ...], Field(max_length=MAX_TASKS)]


class CompressionInput(Schema):
    """forward_s: of the whole forward pass. tensors: in the order of the backward pass. options: for any tensor."""

    forward_s: Seconds
    tensors: Tensors
    options: Annotated[tuple[Option, ...], Field(min_length=1, max_length=MAX_OPTIONS)]

    @field_validator("options")
    @classmethod
    def _distinct(cls, options: tuple[Option, ...]) -> tuple[Option, ...]:
        names = [option.name for option in options]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"options[{i}].name = {name!r} is there twice. Give each option its own name")
        return options


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """options: by name, one a tensor. iteration_time: seconds, from the forward pass to the end of the last task.
    bound: the shortest found where whatever is not on a link takes no time: compression for free."""

    options: tuple[str, ...]
    iteration_time: float
    bound: float


def plan_compression(given: CompressionInput) -> CompressionPlan:
    """An option for each tensor with a short iteration. Exact where all choices can be tried (some 100,000 for six
    tensors), else by local search; no longer than one option for all tensors, or two by size. Deterministic."""
    choice, end_s = timeline(given.tensors, given.options).search(TASKS_SEARCHED)
    free = timeline(given.tensors, tuple(free_of_computing(option) for option in given.options))
    bound_s = min(free.search(TASKS_SEARCHED_FREE)[1], free.end_s(choice), end_s)
    names = tuple(given.options[option].name for option in choice)
    return CompressionPlan(names, given.forward_s + end_s, given.forward_s + bound_s)


def timeline(tensors: Sequence[TensorTimes], options: Sequence[Option]) -> Timeline:
    """The backward pass of these tensors. Resources are numbered as they are first named, after the device."""
    numbers = {DEVICE_NAME: DEVICE}
    for option in options:
        for task in option.tasks:
            numbers.setdefault(task.on, len(numbers))
    return Timeline(
        [(float(tensor.bytes), tensor.backward_s) for tensor in tensors],
        [[(numbers[task.on], task.alpha, task.beta, task.factor) for task in option.tasks] for option in options],
        len(numbers),
    )


def free_of_computing(option: Option) -> Option:
    """The same where only links take time."""
    return Option(
        name=option.name,
        tasks=tuple(
            task if task.on.startswith(LINK) else TaskCost(on=task.on, alpha=0.0, beta=0.0) for task in option.tasks
        ),
    )
