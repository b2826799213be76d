"""Gradient noise scale from one step of nodes with unequal batches: tr(Sigma) / |G|^2, in samples.

Sources: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, for the scale; Cannikin (Ma et al.,
2024), Eq. 10 and Theorem 4.1, for unequal batches. The theorem's weights as printed rest on Cov(|g|^2, |g_i|^2) = 4
b_i |G|^2 tr(Sigma) / B^2; the delta method that the paper uses gives 4 |G|^2 tr(Sigma) / B, whatever b_i. With that
the best combination of the nodes' estimates is the pooled variance below, which is the default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from atoll.controller.planners.water_filling import F64
from atoll.errors import BadInput

Weights = Literal["pooled", "printed"]


@dataclass(frozen=True, slots=True)
class GnsInput:
    """batches: samples per node. local_sqnorms: squared norm of each node's mean gradient; global_sqnorm: that of the
    mean over all samples, g = sum b_i / B g_i. weights: how the nodes' estimates are combined."""

    batches: tuple[int, ...]
    local_sqnorms: tuple[float, ...]
    global_sqnorm: float
    weights: Weights = "pooled"


@dataclass(frozen=True, slots=True)
class GnsEstimate:
    """trace, sqnorm: unbiased for tr(Sigma) and |G|^2; one step's may be negative. noise_scale: their ratio in
    samples, or None where |G|^2 drowns in the noise. Average trace and sqnorm over steps before dividing: the ratio
    is biased."""

    trace: float
    sqnorm: float
    noise_scale: float | None


def estimate_gns(given: GnsInput) -> GnsEstimate:
    """tr(Sigma), |G|^2 and their ratio from what one step measured. Nodes with no samples say nothing and are left
    out.

    One node's gradients say nothing about the noise between nodes: give two successive steps of it as two nodes, with
    the squared norm of their weighted mean. Raises BadInput for fewer than two nodes with samples.
    """
    if len(given.batches) != len(given.local_sqnorms):
        raise BadInput(f"{len(given.batches)} batches and {len(given.local_sqnorms)} local_sqnorms: give one per node")
    b = np.array([n for n in given.batches if n > 0], dtype=np.float64)
    local = np.array([x for n, x in zip(given.batches, given.local_sqnorms, strict=True) if n > 0])
    if len(b) < 2:
        raise BadInput(
            f"{len(b)} nodes with samples: the noise shows between two or more. "
            "Give two successive steps of the node as two nodes, with the squared norm of their mean"
        )
    combine = _pooled if given.weights == "pooled" else _printed
    trace, sqnorm = combine(b, local, given.global_sqnorm)
    return GnsEstimate(trace, sqnorm, noise_scale(trace, sqnorm))


def noise_scale(trace: float, sqnorm: float) -> float | None:
    """tr(Sigma) / |G|^2 in samples; None where |G|^2 is not positive, or their ratio beyond float64."""
    ratio = max(trace, 0.0) / sqnorm if sqnorm > 0 else math.inf
    return ratio if math.isfinite(ratio) else None


def _pooled(b: F64, local: F64, mean_sqnorm: float) -> tuple[float, float]:
    total = b.sum()
    # Summed exactly: the two terms are nearly equal where there is little noise.
    trace = math.fsum([*(b * local).tolist(), -float(total) * mean_sqnorm]) / (len(b) - 1)
    return trace, float(mean_sqnorm - trace / total)


def _printed(b: F64, local: F64, mean_sqnorm: float) -> tuple[float, float]:
    """Eq. 10 with the weights of Theorem 4.1 as they stand in the paper. O(n^3)."""
    total = b.sum()
    rest = total - b
    sqnorm = (total * mean_sqnorm - b * local) / rest
    trace = b * total / rest * (local - mean_sqnorm)
    both = np.outer(rest, rest)
    between = (total**2 - b[:, None] ** 2 - b**2) / (total * both)
    np.fill_diagonal(between, (total + 2 * b) / (total * rest))
    between_traces = np.outer(b, b) * (total - b[:, None] - b) / both
    np.fill_diagonal(between_traces, total * b / rest)
    return float(_weights(between_traces) @ trace), float(_weights(between) @ sqnorm)


def _weights(covariance: F64) -> F64:
    """Those of the combination with the least variance: A^-1 1, made to sum to one."""
    refusal = 'the printed weights do not exist for these batches. Use weights = "pooled"'
    try:
        raised = np.linalg.solve(covariance, np.ones(len(covariance)))
    except np.linalg.LinAlgError as error:
        raise BadInput(refusal) from error
    if not (math.isfinite(raised.sum()) and raised.sum() != 0):
        raise BadInput(refusal)
    return np.asarray(raised / raised.sum(), dtype=np.float64)
