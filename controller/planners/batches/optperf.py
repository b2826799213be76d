"""Split a batch among unequal nodes for the fastest step, with communication beside the backward pass (OptPerf).

Source: Cannikin (Ma et al., 2024), Eq. 5-7 for the step's time. The search is ours. The paper looks for the overlap
state of each node with linear solves, O(n^3 log n). Here the largest batch that a node finishes by a time is the
minimum of two lines in that time. So one root is the optimum of all states together, within bounds, O(n log n)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from atoll.controller.planners.batches.water_filling import F64, Bounds, Levels, PiecewiseTimes, fill
from atoll.planning.schemas import MAX_NODES, MAX_SECONDS, Schema, Seconds, Share, TotalBatch

Bottleneck = Literal["compute", "communication"]

MIN_SLOPE_S: Final = 1e-18
"""Smallest seconds a sample of any node."""
MIN_SLOPE_PART: Final = 1e-15
"""Smallest seconds a sample, as a part of the node's fixed seconds: less drowns in the rounding of float64."""


class NodeModel(Bounds):
    """A node. With a batch of b, load, forward and update take q b + s seconds, and the backward pass k b + m."""

    q: Seconds
    s: Seconds
    k: Seconds
    m: Seconds

    @model_validator(mode="after")
    def _takes_time(self) -> NodeModel:
        if self.q + self.k < (least := _least_slope_s(self.s + self.m)):
            raise ValueError(
                f"has q + k = {self.q + self.k:g}, must be at least {least:g} seconds a sample, {MIN_SLOPE_PART:g} of "
                "s + m. Measure two distinct batches"
            )
        return self

    @classmethod
    def of_measured(cls, **values: Any) -> Self:
        """Make a node of measured times. If samples seem to be free, they take the least that a planner can tell from
        nothing."""
        fixed_s = min(values["s"], MAX_SECONDS) + min(values["m"], MAX_SECONDS)
        missing_s = 2 * _least_slope_s(fixed_s) - (values["q"] + values["k"])
        return super().of_measured(**{**values, "k": values["k"] + max(missing_s, 0.0)})

    def compute_s(self, batch: float) -> float:
        """Return (q + k) b + s + m, the seconds of computing."""
        return (self.q + self.k) * batch + self.s + self.m


def _least_slope_s(fixed_s: float) -> float:
    return max(MIN_SLOPE_S, MIN_SLOPE_PART * fixed_s)


Nodes = Annotated[tuple[NodeModel, ...], Field(min_length=1, max_length=MAX_NODES)]


class Overlap(Schema):
    """Overlap that all nodes share. gamma: share of the backward pass before the first bucket of gradients is ready.
    t_o, t_u: seconds to synchronise all buckets but the last, and the last."""

    gamma: Share
    t_o: Seconds
    t_u: Seconds


class OptPerfInput(Overlap):
    """total_batch: samples of one step, over all nodes."""

    total_batch: TotalBatch
    nodes: Nodes


@dataclass(frozen=True, slots=True)
class OptPerfPlan:
    """batches: whole samples per node. step_time: seconds with them. continuous, optperf: the same before rounding.
    bottlenecks: the end of each node's step: its backward pass, or the communication that began in it."""

    batches: tuple[int, ...]
    continuous: tuple[float, ...]
    step_time: float
    optperf: float
    bottlenecks: tuple[Bottleneck, ...]


def plan_optperf(given: OptPerfInput) -> OptPerfPlan:
    """Minimise the time of the slowest node over all splits of the total batch within bounds. Exact. O(n log n).

    A node with a batch of 0 still takes part in the step, with its fixed cost. Raises NoFeasiblePlan."""
    times = step_times(given.nodes, given)
    filled = fill(times, given.total_batch)
    compute, communication = times.slope_2N * np.array(filled.batches) + times.offset_2N
    return OptPerfPlan(
        filled.batches,
        filled.continuous,
        float(np.maximum(compute, communication).max()),
        max(filled.level_s, times.floor_s()),
        tuple("compute" if slower else "communication" for slower in (compute >= communication).tolist()),
    )


def optperf_of_totals(nodes: Sequence[NodeModel], overlap: Overlap, totals: Sequence[int]) -> F64:
    """Return the seconds of the fastest step [C] for many total batches; NaN if the bounds cannot hold a batch.

    The breakpoints are sorted once for all of them."""
    times = step_times(nodes, overlap)
    total_C = np.array(totals, dtype=np.float64)
    fits = (times.low_N.sum() <= total_C) & (total_C <= times.high_N.sum())
    found = np.full(len(total_C), np.nan)
    if fits.any():
        found[fits] = np.maximum(Levels(times).levels(total_C[fits]), times.floor_s())
    return found


def step_times(nodes: Sequence[NodeModel], overlap: Overlap) -> PiecewiseTimes:
    """Return the time of each node within its bounds: `step_lines`."""
    qskm_N4 = np.array([(n.q, n.s, n.k, n.m) for n in nodes], dtype=np.float64)
    return PiecewiseTimes.of(*step_lines(qskm_N4, overlap.gamma, overlap.t_o, overlap.t_u), nodes)


def step_lines(qskm_N4: F64, gamma: float, t_o: float, t_u: float) -> tuple[F64, F64]:
    """Return the time of each node as slopes and offsets [2, N] of two lines, of which the higher counts:

        T_i(b) = max(q b + s + k b + m + t_u,  q b + s + gamma (k b + m) + t_o + t_u)

    The first is bound by the node's computing, the second by communication. Source: Cannikin, Eq. 7."""
    q, s, k, m = qskm_N4.T
    return np.stack([q + k, q + gamma * k]), np.stack([s + m + t_u, s + gamma * m + t_o + t_u])
