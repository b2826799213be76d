"""Gradient noise scale from one step of nodes with unequal batches: tr(Sigma) / |G|^2, in samples.

Sources: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, for the scale; Cannikin (Ma et al.,
2024), Eq. 10 and Theorem 4.1, for unequal batches. The theorem's weights as printed rest on Cov(|g|^2, |g_i|^2) = 4
b_i |G|^2 tr(Sigma) / B^2; the delta method that the paper uses gives 4 |G|^2 tr(Sigma) / B, whatever b_i. With that
the best combination of the nodes' estimates is the pooled variance (`combine`). The tests keep the printed weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from atoll.errors import BadInput
from atoll.planning.schemas import MAX_NODES, Samples, Schema

SqNorm = Annotated[float, Field(ge=0, le=1e200)]
"""Bound on squared norms: beyond any gradient's, and no product of two overflows."""


class GnsInput(Schema):
    """batches: samples per node. local_sqnorms: squared norm of each node's mean gradient; global_sqnorm: that of the
    mean over all samples, g = sum b_i / B g_i."""

    batches: Annotated[tuple[Samples, ...], Field(min_length=1, max_length=MAX_NODES)]
    local_sqnorms: Annotated[tuple[SqNorm, ...], Field(min_length=1, max_length=MAX_NODES)]
    global_sqnorm: SqNorm


@dataclass(frozen=True, slots=True)
class GnsEstimate:
    """trace, sqnorm: unbiased estimates of tr(Sigma) and |G|^2; those of one step may be negative. noise_scale: their
    ratio in samples, or None if |G|^2 drowns in the noise. The ratio is biased: average trace and sqnorm over steps
    before dividing."""

    trace: float
    sqnorm: float
    noise_scale: float | None


def estimate_gns(given: GnsInput) -> GnsEstimate:
    """Estimate tr(Sigma), |G|^2 and their ratio from one step. Nodes without samples are left out.

    One node's gradients do not show the noise between nodes: give two successive steps of it as two nodes, with the
    squared norm of their weighted mean. Raises BadInput for fewer than two nodes with samples."""
    if len(given.batches) != len(given.local_sqnorms):
        raise BadInput(f"{len(given.batches)} batches and {len(given.local_sqnorms)} local_sqnorms: give one per node")
    told = [(b, x) for b, x in zip(given.batches, given.local_sqnorms, strict=True) if b > 0]
    if len(told) < 2:
        raise BadInput(
            f"{len(told)} nodes with samples: the noise shows between two or more. "
            "Give two successive steps of the node as two nodes, with the squared norm of their mean"
        )
    batches, local_sqnorms = zip(*told, strict=True)
    trace, sqnorm = combine(batches, local_sqnorms, given.global_sqnorm)
    ratio = max(trace, 0.0) / sqnorm if sqnorm > 0 else math.inf
    return GnsEstimate(trace, sqnorm, ratio if math.isfinite(ratio) else None)


def combine(batches: Sequence[int], local_sqnorms: Sequence[float], global_sqnorm: float) -> tuple[float, float]:
    """Estimate tr(Sigma) and |G|^2 without bias from n >= 2 nodes with b_i >= 1 samples each, B = sum b_i:

        tr(Sigma) = (sum b_i |g_i|^2 - B |g|^2) / (n - 1)
        |G|^2     = |g|^2 - tr(Sigma) / B

    Derived from E|g_i|^2 = |G|^2 + tr(Sigma) / b_i and E|g|^2 = |G|^2 + tr(Sigma) / B (McCandlish et al., appendix
    A.1)."""
    # Summed exactly: the two terms are nearly equal where there is little noise.
    weighted = math.fsum(float(b) * x for b, x in zip(batches, local_sqnorms, strict=True))
    return pooled(len(batches), sum(batches), weighted, sum(batches) * global_sqnorm)


def pooled(nodes: int, samples: int, weighted: float, combined: float, groups: int = 1) -> tuple[float, float]:
    """Estimate like `combine`, from sums over the nodes: samples is B, weighted is sum b_i |g_i|^2, combined is B
    |g|^2.

    groups: number of groups of nodes that have a combined gradient of their own. The sums are over all groups:

        tr(Sigma) = (sum b_i |g_i|^2 - sum_j B_j |g_j|^2) / (n - groups)
        |G|^2     = (sum_j B_j |g_j|^2 - groups tr(Sigma)) / sum_j B_j"""
    trace = (weighted - combined) / (nodes - groups)
    return trace, (combined - groups * trace) / samples
