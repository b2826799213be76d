"""Split a batch without a model of communication: evenly, or in inverse proportion to each node's time per sample.

Source: Cannikin (Ma et al., 2024), Eq. 8. Bounds and the rounding to whole samples are ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Discriminator, Field, Tag

from atoll.controller.planners.batches.water_filling import Bounds, PiecewiseTimes, fill
from atoll.planning.schemas import MAX_NODES, Schema, TotalBatch


class EvenInput(Schema):
    """total_batch: samples of one step, over all nodes. nodes: their bounds, or their number if there are none."""

    total_batch: TotalBatch
    nodes: Annotated[
        Annotated[int, Field(ge=1, le=MAX_NODES), Tag("(count)")]
        | Annotated[tuple[Bounds, ...], Field(min_length=1, max_length=MAX_NODES), Tag("(each)")],
        Discriminator(lambda nodes: "(count)" if isinstance(nodes, int) else "(each)"),
    ]


@dataclass(frozen=True, slots=True)
class EvenPlan:
    """batches: samples of each node, in order; their sum is the total batch."""

    batches: tuple[int, ...]


class TimedNode(Bounds):
    """seconds_per_sample: positive, since the split divides by it."""

    seconds_per_sample: Annotated[float, Field(ge=1e-12, le=1e9)]


class InverseTimeInput(Schema):
    """total_batch: samples of one step, over all nodes."""

    total_batch: TotalBatch
    nodes: Annotated[tuple[TimedNode, ...], Field(min_length=1, max_length=MAX_NODES)]


@dataclass(frozen=True, slots=True)
class InverseTimePlan:
    """batches: whole samples per node, summing to the total batch. continuous: the optimum before rounding. step_time:
    seconds that the slowest node computes with `batches`."""

    batches: tuple[int, ...]
    continuous: tuple[float, ...]
    step_time: float


def split_evenly(given: EvenInput) -> EvenPlan:
    """Return samples as equal as the bounds allow. O(n log n). Raises NoFeasiblePlan."""
    nodes = (Bounds(),) * given.nodes if isinstance(given.nodes, int) else given.nodes
    return EvenPlan(fill(_times([1.0] * len(nodes), nodes), given.total_batch).batches)


def split_by_inverse_time(given: InverseTimeInput) -> InverseTimePlan:
    """Minimise max_i b_i t_i with sum b_i = B and the bounds. O(n log n).

    Node i finishes min(max(T / t_i, lo_i), hi_i) samples in time T; the sum grows with T. Raises NoFeasiblePlan."""
    times_s = [node.seconds_per_sample for node in given.nodes]
    filled = fill(_times(times_s, given.nodes), given.total_batch)
    step_time = max(batch * time_s for batch, time_s in zip(filled.batches, times_s, strict=True))
    return InverseTimePlan(filled.batches, filled.continuous, step_time)


def _times(seconds_per_sample: Sequence[float], bounds: Sequence[Bounds]) -> PiecewiseTimes:
    slope = np.array([seconds_per_sample] * 2, dtype=np.float64)
    return PiecewiseTimes.of(slope, np.zeros_like(slope), bounds)
