"""Choose for each tensor whether it is compressed, where, and how it is sent.

Source: Espresso (Wang, 2023), chapter 4: F(S), the iteration time by a simulated timeline, and the search for a short
one. `atoll.kernels.timeline` simulates and searches. An option is a chain of tasks, so the caller says what can be
chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, field_validator

from atoll.kernels.timeline import DEVICE, Timeline
from atoll.planning.schemas import Name, Schema, Seconds

MAX_TENSORS: Final = 10_000
MAX_OPTIONS: Final = 256
MAX_TASKS: Final = 64
"""Tasks of one option."""
DEVICE_NAME: Final = "gpu"
"""Name of the resource that runs the backward pass."""
LINK: Final = "link"
"""Prefix of the names of links."""

TASKS_SEARCHED: Final = 2_500_000
"""Simulated tasks of the search: some 40 ms of one core."""

SecondsPerByte = Annotated[float, Field(ge=0, le=1)]
TensorBytes = Annotated[int, Field(ge=0, le=2**50)]


class TensorTimes(Schema):
    """A tensor of the model. bytes: size of its gradient, uncompressed. backward_s: its share of the backward pass."""

    bytes: TensorBytes
    backward_s: Seconds


Tensors = Annotated[tuple[TensorTimes, ...], Field(min_length=1, max_length=MAX_TENSORS)]


class TaskCost(Schema):
    """A task on the resource `on`, which takes alpha + beta * bytes * factor seconds."""

    on: Name
    alpha: Seconds
    beta: SecondsPerByte
    factor: Annotated[float, Field(ge=0, le=1e6)] = 1.0


class Option(Schema):
    """One way to synchronise a tensor: its tasks in their order."""

    name: Name
    tasks: Annotated[tuple[TaskCost, ...], Field(max_length=MAX_TASKS)]


class CompressionInput(Schema):
    """forward_s: seconds of the forward pass. tensors: in the order of the backward pass. options: for any tensor."""

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
    """options: name of each tensor's option. iteration_time: seconds from the forward pass to the end of the last
    task."""

    options: tuple[str, ...]
    iteration_time: float


def plan_compression(given: CompressionInput) -> CompressionPlan:
    """Return an option for each tensor with a short iteration. Deterministic.

    Exact where all choices can be tried (some 100,000 for six tensors). Otherwise a local search; it is no longer than
    with one option for all tensors, or two by size."""
    choice, end_s = timeline(given.tensors, given.options).search(TASKS_SEARCHED)
    names = tuple(given.options[option].name for option in choice)
    return CompressionPlan(names, given.forward_s + end_s)


def timeline(tensors: Sequence[TensorTimes], options: Sequence[Option]) -> Timeline:
    """Return the timeline of one backward pass. Resources get numbers in the order of their first use, after the
    device."""
    numbers = {DEVICE_NAME: DEVICE}
    for option in options:
        for task in option.tasks:
            numbers.setdefault(task.on, len(numbers))
    return Timeline(
        [(float(tensor.bytes), tensor.backward_s) for tensor in tensors],
        [[(numbers[task.on], task.alpha, task.beta, task.factor) for task in option.tasks] for option in options],
        len(numbers),
    )
