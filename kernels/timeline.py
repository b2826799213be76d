"""Simulate the synchronisation of a model's gradients, and search for a short one.

N: tensors, in the order of the backward pass. T: tasks of one option. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.kernels import _native
from atoll.kernels.refusals import refusals

DEVICE = 0
"""Number of the resource that runs the backward passes."""


class Timeline:
    """One backward pass and the synchronisation of its tensors. kernels/planning/timeline.hpp has the order of service.

    tensors [N]: (bytes, seconds of the backward pass). options: the tasks [T] of each option in their order, as
    (resource, alpha, beta, factor); a task takes alpha + beta * bytes * factor seconds. resources: their number.
    One thread at a time. Raises BadInput for arguments that do not fit.
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
        """Return the seconds until everything has ended, with option choice[i] for tensor i."""
        with refusals("Timeline.end_s"):
            return self._native.end_s(choice)

    def search(self, tasks: int) -> tuple[list[int], float]:
        """Return an option for each tensor with a short timeline, and its end (rules: kernels/planning/search.hpp).

        tasks: about how many to simulate."""
        with refusals("Timeline.search"):
            return self._native.search(tasks)


def fuse(
    tensors: Sequence[tuple[float, float]], compress: tuple[float, float, float], communicate: tuple[float, float]
) -> tuple[list[int], float]:
    """Return the end of each group of consecutive tensors, and the time at which all are sent. No grouping is sooner.

    tensors [N]: (bytes, seconds of the backward pass). compress: (alpha, beta, floor); a group takes alpha + beta *
    max(bytes, floor) seconds on the device. communicate: (alpha, beta), on one link.
    """
    with refusals("fuse"):
        return _native.fuse(tensors, compress, communicate)
