"""Split a batch in inverse proportion to each node's time per sample, so that all nodes compute equally long.

Source: Cannikin (Ma et al., 2024), Eq. 8. Bounds and the rounding to whole samples are ours. Communication is left
out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from atoll.controller.planners.batches.bounds import Bounds
from atoll.controller.planners.batches.water_filling import Levels, PiecewiseTimes, whole
from atoll.planning.schemas import MAX_NODES, Schema, TotalBatch


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


def split_by_inverse_time(given: InverseTimeInput) -> InverseTimePlan:
    """Minimise max_i b_i t_i with sum b_i = B and the bounds. O(n log n).

    Node i finishes min(max(T / t_i, lo_i), hi_i) samples in time T; the sum grows with T. Whole batches are rounded
    down, and the rest goes one by one to the node whose time rises least. That is optimal because times grow with
    batches. Raises NoFeasiblePlan."""
    slope = np.array([[node.seconds_per_sample for node in given.nodes]] * 2, dtype=np.float64)
    times = PiecewiseTimes.of(slope, np.zeros_like(slope), given.nodes)
    times.require(given.total_batch)
    levels = Levels(times)
    continuous = levels.split(levels.levels(np.array([given.total_batch], dtype=np.float64)))[0]
    batches = whole(times, continuous, given.total_batch)
    step_time = max(b * node.seconds_per_sample for b, node in zip(batches, given.nodes, strict=True))
    return InverseTimePlan(tuple(batches), tuple(continuous.tolist()), step_time)
