"""Combine the costs that workers measured into the input of planner `tensor-groups`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.controller.planners.tensor_compression.compression import CompressionInput, Option, TaskCost, TensorTimes
from atoll.step_estimators.observed import ObservedStep
from atoll.strategies.compressed.codes.algorithm import Algorithm
from atoll.strategies.compressed.costs.link_costs import least_cost
from atoll.strategies.compressed.costs.measured import MeasuredCosts
from atoll.strategies.compressed.groups.options import Way, ways
from atoll.strategies.declaration import Declared

RESOURCES: Final = {"device": "gpu", "cpu": "cpu"}
"""Resources of the timeline, by the device of a way. The device of the backward pass is called gpu there, whatever it
is."""
LINK: Final = "link"


@dataclass(frozen=True, slots=True)
class CompressionCosts:
    """Costs of a run: the input of planner `tensor-groups`, and the number of tensors behind each of its rows."""

    given: CompressionInput
    counts: tuple[int, ...]
    iteration_s: float
    algorithm: Algorithm


class CostEstimator:
    """A MessageEstimator of one run: the newest message of each rank."""

    def __init__(self) -> None:
        self._reported: dict[int, MeasuredCosts] = {}

    def observe(self, rank: int, step: ObservedStep) -> None:
        """Ignore steps: messages have all of it."""

    def on_message(self, rank: int, message: Declared) -> None:
        if isinstance(message, MeasuredCosts):
            self._reported[rank] = message

    def estimate(self) -> Mapping[int, MeasuredCosts]:
        return dict(self._reported)


def costs_of(told: Mapping[int, MeasuredCosts], ranks: int) -> CompressionCosts | None:
    """Combine the costs of all ranks; None before all have reported, or if they report different models.

    A step waits for the slowest rank: of backward and compression times the longest counts. All ranks measure an
    exchange together, and the last rank to enter does not wait: of exchange times the shortest counts."""
    if len(told) < ranks:
        return None
    each = [told[rank] for rank in sorted(told)]
    first = each[0]
    if any(
        [row[:2] for row in one.tensors] != [row[:2] for row in first.tensors] or one.groups != first.groups
        for one in each
    ):
        return None
    tensors = tuple(
        TensorTimes.of_measured(bytes=first.tensors[row][1], backward_s=max(one.tensors[row][2] for one in each) * 1e-6)
        for row in range(len(first.tensors))
    )
    link, allreduce = (least_cost([getattr(one, name) for one in each]) for name in ("link", "allreduce"))
    costs = {
        name: _most([getattr(one, name) for one in each])
        for name in ("compress_device", "compress_cpu", "decompress_device", "decompress_cpu")
    }
    options = tuple(
        Option(name=way.name, tasks=_tasks(way, first, link, allreduce, costs))
        for way in ways(divisible=first.divisible)
    )
    given = CompressionInput.of_measured(forward_s=max(one.rest_s for one in each), tensors=tensors, options=options)
    counts = tuple(row[0] for row in first.tensors)
    return CompressionCosts(given, counts, max(one.iteration_s for one in each), first.algorithm)


def _tasks(
    way: Way,
    told: MeasuredCosts,
    link: Sequence[float],
    allreduce: Sequence[float],
    costs: Mapping[str, Sequence[float]],
) -> tuple[TaskCost, ...]:
    """Return the tasks of a way. n workers, r the ratio of compression, C and D the cost of compressing and
    decompressing M bytes.

    Indivisible: C(M); (n - 1) r M on the link; D(M) n times. Divisible: C(M); (n - 1) / n r M; then of a part of M / n:
    D n times and C, by the exchange's thread; (n - 1) / n r M; D of n parts."""
    if not way.compressed:
        return (TaskCost.of_measured(on=LINK, alpha=allreduce[0], beta=allreduce[1]),)
    n, (alpha, beta) = told.workers, link
    (c_alpha, c_beta), (d_alpha, d_beta) = costs[f"compress_{way.compress}"], costs[f"decompress_{way.decompress}"]
    if not way.divisible:
        return (
            TaskCost.of_measured(on=RESOURCES[way.compress], alpha=c_alpha, beta=c_beta),
            TaskCost.of_measured(on=LINK, alpha=alpha, beta=beta, factor=(n - 1) * told.ratio),
            TaskCost.of_measured(on=RESOURCES[way.decompress], alpha=n * d_alpha, beta=n * d_beta),
        )
    (again_alpha, again_beta), (sum_alpha, sum_beta) = costs["compress_cpu"], costs["decompress_cpu"]
    part = TaskCost.of_measured(on=LINK, alpha=alpha, beta=beta, factor=(n - 1) / n * told.ratio)
    return (
        TaskCost.of_measured(on=RESOURCES[way.compress], alpha=n * c_alpha, beta=c_beta),
        part,
        TaskCost.of_measured(on="cpu", alpha=n * sum_alpha + again_alpha, beta=(n * sum_beta + again_beta) / n),
        part,
        TaskCost.of_measured(on=RESOURCES[way.decompress], alpha=n * d_alpha, beta=d_beta),
    )


def _most(each: Sequence[Sequence[float]]) -> list[float]:
    return [max(one[place] for one in each) for place in range(2)]


def link_bps(given: CompressionInput) -> float:
    """Return the bits a second that leave a worker in an exchange of all; without compression those of an all-reduced
    gradient."""
    tasks = [task for option in reversed(given.options) for task in option.tasks if task.on == LINK]
    return 8 / tasks[0].beta if tasks and tasks[0].beta else 0.0
