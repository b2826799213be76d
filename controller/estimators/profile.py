"""Profile of a run, the planners' input: ranks, links and gradients, each with its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.controller.planners.batches.optperf import NodeModel
from atoll.step_estimators.estimates import NodeEstimate, RankProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapEstimate:
    """gamma: share of the backward pass before the first bucket of gradients is ready. t_o, t_u: seconds that all
    buckets but the last take to synchronise, and the last. error_s: standard error of t_o + t_u."""

    gamma: float
    t_o: float
    t_u: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """Gradient noise scale tr(Sigma) / |G|^2 in samples, from `steps` sampled steps. error: its relative standard
    error, infinite if |G|^2 drowns in the noise; then noise_scale is a lower bound. low, high: two standard errors of
    |G|^2 from it; high is infinite if |G|^2 may be 0."""

    noise_scale: float
    error: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """Bandwidth from an island to the others: bits per second, with its relative standard error."""

    bandwidth_bps: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Profile of one run. step_s: median of the newest steps under plan `plan` from boundary to boundary, on the
    slowest rank; 0 if unknown. total_batch: the largest under the newest plan. entries: trained parameters, 0 before
    the script reports them.

    ranks: those with measurements, by rank. links: by island. paths: bits a second from one island to another.
    sampled_steps: steps whose gradient noise was sampled. of_strategy: the estimate of the strategy's own estimator;
    None if it has none."""

    plan: int
    total_batch: int
    entries: int
    step_s: float
    steps: int
    newest_step: int
    ranks: Mapping[int, RankProfile] = field(default_factory=dict)
    overlap: OverlapEstimate | None = None
    noise: NoiseEstimate | None = None
    sampled_steps: int = 0
    links: Mapping[str, LinkEstimate] = field(default_factory=dict)
    paths: Mapping[tuple[str, str], float] = field(default_factory=dict)
    of_strategy: object = None


def node_model(estimate: NodeEstimate, min_batch: int, max_batch: int | None = None) -> NodeModel:
    """Return the planners' model of a rank."""
    bounds = {"min_batch": min_batch} if max_batch is None else {"min_batch": min_batch, "max_batch": max_batch}
    return NodeModel.of_measured(q=estimate.q, s=estimate.s, k=estimate.k, m=estimate.m, **bounds)
