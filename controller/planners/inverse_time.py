"""Batches in inverse proportion to each node's time per sample, so that all nodes compute equally long.

Source: Cannikin (Ma et al., 2024), Eq. 8; bounds and the rounding to whole samples are ours. Communication is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.controller.planners.bounds import Bounds
from atoll.controller.planners.water_filling import Levels, StepTimes, whole


@dataclass(frozen=True, slots=True)
class InverseTimeInput:
    """total_batch: samples of one step. seconds_per_sample: one per node, > 0; bounds: one per node."""

    total_batch: int
    seconds_per_sample: tuple[float, ...]
    bounds: tuple[Bounds, ...]


@dataclass(frozen=True, slots=True)
class InverseTimePlan:
    """batches: whole samples per node, summing to the total batch. continuous: the optimum before rounding.
    step_time: seconds that the slowest node computes with `batches`."""

    batches: tuple[int, ...]
    continuous: tuple[float, ...]
    step_time: float


def split_by_inverse_time(given: InverseTimeInput) -> InverseTimePlan:
    """Minimise max_i b_i t_i with sum b_i = B and the bounds. O(n log n).

    Node i finishes min(max(T / t_i, lo_i), hi_i) samples in time T; the sum grows with T. Whole numbers: rounded down,
    the rest goes one by one to where the time rises least, which is optimal because times grow with batches. Raises
    NoFeasiblePlan.
    """
    slope = np.array([given.seconds_per_sample] * 2, dtype=np.float64)
    times = StepTimes.of(slope, np.zeros_like(slope), given.bounds)
    times.require(given.total_batch)
    levels = Levels(times)
    continuous = levels.split(levels.levels(np.array([given.total_batch], dtype=np.float64)))[0]
    batches = whole(times, continuous, given.total_batch)
    step_time = max(b * t for b, t in zip(batches, given.seconds_per_sample, strict=True))
    return InverseTimePlan(tuple(batches), tuple(continuous.tolist()), step_time)
