"""Choose the total batch that learns fastest: samples per second, weighted by the worth of a sample to learning.

Sources: Pollux (Qiao et al., 2021) for goodput and statistical efficiency; AdaScale (Johnson et al., 2020) for its
gain; Cannikin (Ma et al., 2024), section 4.5, for OptPerf as the time of a step. All candidates are timed in one
pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from atoll.controller.planners.batches.optperf import Nodes, OptPerfInput, Overlap, optperf_of_totals, plan_optperf
from atoll.errors import NoFeasiblePlan
from atoll.planning.schemas import TotalBatch

Rule = Literal["adascale", "square-root"]


class GoodputInput(Overlap):
    """candidates: total batches to choose from. noise_scale: tr(Sigma) / |G|^2 in samples, >= 0. initial_batch: total
    batch for which the learning rate was tuned. rule: "adascale" for SGD, "square-root" for Adam and AdamW.
    batches_per_update: number of total batches that one update accumulates; a sample is worth as much as in a batch of
    them all."""

    candidates: Annotated[tuple[TotalBatch, ...], Field(min_length=1, max_length=1000)]
    nodes: Nodes
    noise_scale: Annotated[float, Field(ge=0, le=1e15)]
    initial_batch: TotalBatch
    rule: Rule = "adascale"
    batches_per_update: TotalBatch = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A total batch. optperf: seconds of its fastest step. throughput: samples a second. efficiency: worth of a sample
    against one of the initial batch. goodput: throughput times efficiency. None if the nodes' bounds cannot hold the
    batch."""

    total_batch: int
    optperf: float | None
    throughput: float | None
    efficiency: float
    goodput: float | None


@dataclass(frozen=True, slots=True)
class GoodputPlan:
    """The chosen total batch and its split. learning_rate_factor: factor on the rate that was tuned for the initial
    batch."""

    total_batch: int
    batches: tuple[int, ...]
    step_time: float
    efficiency: float
    goodput: float
    learning_rate_factor: float
    candidates: tuple[Candidate, ...]


def plan_goodput(given: GoodputInput) -> GoodputPlan:
    """Return the candidate with the highest goodput, the smallest of equals. O(n log n + n c) for n nodes, c
    candidates.

        goodput(B) = B / T*(B) * efficiency(B),  T* the step's time of the best split (plan_optperf)

    Raises NoFeasiblePlan if the bounds hold none of them."""
    candidates = tuple(_candidates(given))
    feasible = [(c.goodput, -c.total_batch) for c in candidates if c.goodput is not None]
    if not feasible:
        least = sum(n.min_batch for n in given.nodes)
        raise NoFeasiblePlan(
            f"none of the {len(candidates)} candidates, {min(given.candidates)} to {max(given.candidates)}, fits the "
            f"bounds of {len(given.nodes)} nodes, which need {least} samples at least. Give other candidates or bounds"
        )
    total = -max(feasible)[1]
    split = plan_optperf(
        OptPerfInput(total_batch=total, nodes=given.nodes, gamma=given.gamma, t_o=given.t_o, t_u=given.t_u)
    )
    worth, many = _worth(given, total), given.batches_per_update
    factor = learning_rate_factor(given.rule, given.noise_scale, many * given.initial_batch, many * total)
    return GoodputPlan(
        total, split.batches, split.step_time, worth, total / split.step_time * worth, factor, candidates
    )


def _candidates(given: GoodputInput) -> list[Candidate]:
    times = optperf_of_totals(given.nodes, given, given.candidates).tolist()
    found = []
    for total, step_s in zip(given.candidates, times, strict=True):
        worth = _worth(given, total)
        if math.isnan(step_s):
            found.append(Candidate(total, None, None, worth, None))
        else:
            found.append(Candidate(total, step_s, total / step_s, worth, total / step_s * worth))
    return found


def _worth(given: GoodputInput, total: int) -> float:
    many = given.batches_per_update
    return efficiency(given.noise_scale, many * given.initial_batch, many * total)


def efficiency(noise_scale: float, initial_batch: int, total_batch: int) -> float:
    """Return the progress of a sample in a batch of B = `total_batch` against one in the initial batch: 1 there, less
    beyond.

        efficiency(B) = (phi + B_0) / (phi + B),  phi = tr(Sigma) / |G|^2

    Source: Pollux (Qiao et al., 2021), statistical efficiency."""
    return (noise_scale + initial_batch) / (noise_scale + total_batch)


def learning_rate_factor(rule: Rule, noise_scale: float, initial_batch: int, total_batch: int) -> float:
    """Return the factor on the initial batch's learning rate.

        adascale:     (tr / B_0 + |G|^2) / (tr / B + |G|^2) = B / B_0 * efficiency(B)
        square-root:  sqrt(B / B_0)

    The first lies between 1 (no noise) and B / B_0 (nothing but noise). Source: AdaScale (Johnson et al., 2020)."""
    scale = total_batch / initial_batch
    return math.sqrt(scale) if rule == "square-root" else scale * efficiency(noise_scale, initial_batch, total_batch)


def candidates_between(low: int, high: int, count: int) -> tuple[int, ...]:
    """Return up to `count` total batches from `low` to `high` in equal ratios, both ends included. 1 <= low <= high."""
    steps = [i / max(count - 1, 1) for i in range(count)]
    return tuple(sorted({min(max(round(low * (high / low) ** step), low), high) for step in steps}))
