"""Estimates of one rank of a run, as its machine makes them of the rank's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Time of a step with a local batch of b: load, forward and update take q b + s seconds, backward k b + m.

    error: relative standard error of the whole."""

    q: float
    s: float
    k: float
    m: float
    error: float

    def compute_s(self, batch: float) -> float:
        return (self.q + self.k) * batch + self.s + self.m


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEstimate(StepLine):
    """Line of a measured rank. error: at a fifth below and above the newest batch. low_batch, high_batch: range of the
    batches that it was fitted to."""

    low_batch: int
    high_batch: int


class BatchPoint(NamedTuple):
    """A rank computes a step of local_batch samples in compute_s seconds; error: its relative standard error."""

    local_batch: int
    compute_s: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """compute_s: median under the newest plan, compute_error_s its standard error, over `steps` steps of `local_batch`
    samples. estimate: None before two distinct batches were measured. points: what each local batch seen lately takes
    as of now, ascending; estimators.saturation makes (alpha, beta) of them. trained_batch: the most samples of a
    pass so far. max_batch: those that memory holds, from its peak of peak_bytes out of memory_bytes; 0 if not known.
    """

    plan: int
    local_batch: int
    compute_s: float
    compute_error_s: float
    steps: int
    estimate: NodeEstimate | None = None
    points: tuple[BatchPoint, ...] = ()
    trained_batch: int = 0
    max_batch: int = 0
    peak_bytes: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """All that is made of one rank's steps so far. plan: the newest; total_batch: the largest under it, as an epoch's
    last batch may be short; last_step: the newest, -1 before the first. step_s: median from boundary to boundary under
    that plan, of whole_steps steps; 0 of none. stall_share: of the newest steps, waiting for what others send. gamma:
    share of the backward pass before the first bucket, its variance that of the mean: infinite, and gamma 0, before two
    steps told of it. measured: whether any step counts. profile: None before enough steps under the newest plan."""

    plan: int = 0
    total_batch: int = 0
    last_step: int = -1
    step_s: float = 0.0
    whole_steps: int = 0
    stall_share: float = 0.0
    gamma: float = 0.0
    gamma_variance: float = math.inf
    measured: bool = False
    profile: RankProfile | None = None
