"""The iteration of a model as a timeline of its device, links and processors; and searches on it.

N tensors in the order of the backward pass; T tasks of an option. Times in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.kernels import _native
from atoll.kernels.refusals import refusals

DEVICE = 0
"""The resource on which backward passes run."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a resource served a task. place: 0 for the backward pass, then the option's tasks from 1."""

    tensor: int
    place: int
    resource: int
    start_s: float
    end_s: float


class Timeline:
    """One backward pass and the synchronisation of its tensors. kernels/planning/timeline.hpp has the order of service.

    tensors [N]: (bytes, seconds of the backward pass). options: of each the tasks [T] in their order, as (resource,
    alpha, beta, factor), which takes alpha + beta * bytes * factor seconds. resources: how many there are.
    Not for several threads at once. Raises BadInput for what does not fit.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[float, float]],
        options: Sequence[Sequence[tuple[int, float, float, float]]],
        resources: int,
    ) -> None:
        with refusals("Timeline"):
            self._native = _native.Timeline(tensors, options, resources)

    def end_s(self, choice: Sequence[int]) -> float:
        """From the first backward pass's begin to the end of all, with option choice[i] for tensor i."""
        with refusals("Timeline.end_s"):
            return self._native.end_s(choice)

    def spans(self, choice: Sequence[int]) -> list[Span]:
        """The same, task by task, as they end."""
        with refusals("Timeline.spans"):
            return [Span(*row) for row in self._native.spans(choice)]

    def search(self, tasks: int) -> tuple[list[int], float]:
        """An option for each tensor with an early end, and that end. Exact where all choices can be tried; else no
        later than one option for all, or two by size. tasks: how many it may simulate, about."""
        with refusals("Timeline.search"):
            return self._native.search(tasks)


def fuse(
    tensors: Sequence[tuple[float, float]], compress: tuple[float, float, float], communicate: tuple[float, float]
) -> tuple[list[int], float]:
    """The runs of tensors that are best compressed and sent as one: the end of each, and when all has ended. Exact.

    tensors [N]: (bytes, seconds of the backward pass). compress: (alpha, beta, floor): alpha + beta * max(bytes,
    floor) seconds on the device. communicate: (alpha, beta), on one link.
    """
    with refusals("fuse"):
        return _native.fuse(tensors, compress, communicate)
