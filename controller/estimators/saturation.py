"""Fit the throughput of a device that saturates: f(x) = min(beta / alpha * x, beta) samples a second at a local batch
of x.

Source: StellaTrain (Lim et al., 2024), Eq. 2, which fits with Nelder-Mead. With the knee between two neighbouring
batches the sum of squares is a parabola in slope and plateau. So trying each gap and each batch for the knee finds the
minimum exactly. Nelder-Mead from any start ends no lower (tests/controller/estimators/test_saturation.py), and takes a
hundred times as long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from atoll.step_estimators.estimates import BatchPoint, NodeEstimate, RankProfile

_MAX_LINE_MISFIT: Final = 4.0
"""Mean square of the residuals, in standard errors, from which a line does not fit the device."""
_MAX_KNEE_SHARE: Final = 0.5
"""Share of the line's sum of squares that a knee may leave to be accepted: both have two coefficients."""


@dataclass(frozen=True, slots=True)
class SaturationEstimate:
    """alpha: samples that saturate the device. beta: samples a second from there on. error: relative standard error of
    the throughput at the measured batches.

    If no measured batch saturates the device, alpha is the largest: it is not assumed to become any faster beyond. If
    all do, alpha is the smallest."""

    alpha: float
    beta: float
    error: float

    def compute_s(self, batch: float) -> float:
        return max(batch, self.alpha) / self.beta


def curve_of(rank: RankProfile) -> NodeEstimate | SaturationEstimate | None:
    """Return the time of a rank's computing over its batch: its line, or its knee if at least three batches were
    measured that only a knee explains. None before two batches were measured."""
    line = rank.estimate
    if line is None or len(rank.points) < 3 or any(point.local_batch < 1 for point in rank.points):
        return line
    crooked = _off(rank.points, line)
    if crooked / (len(rank.points) - 2) < _MAX_LINE_MISFIT:  # as nearly all are, and a thousand of them are asked
        return line
    found = fit_saturation(rank.points)
    return line if found is None or _off(rank.points, found) > _MAX_KNEE_SHARE * crooked else found


def _off(points: Sequence[BatchPoint], curve: NodeEstimate | SaturationEstimate) -> float:
    """Return the sum of squares, in standard errors of the points."""
    return math.fsum(
        (math.log(curve.compute_s(point.local_batch) / point.compute_s) / max(point.error, 1e-3)) ** 2
        for point in points
    )


def fit_saturation(points: Sequence[BatchPoint]) -> SaturationEstimate | None:
    """Fit the throughput by weighted least squares. None before two distinct batches of at least one sample were
    measured."""
    usable = sorted((p for p in points if p.local_batch > 0 and p.compute_s > 0), key=lambda p: p.local_batch)
    if len(usable) < 2:
        return None
    x = [float(p.local_batch) for p in usable]
    f = [p.local_batch / p.compute_s for p in usable]
    weights = [1 / (max(p.error, 1e-3) * f_i) ** 2 for p, f_i in zip(usable, f, strict=True)]
    knees = [*x, *(alpha for low, high in pairwise(range(len(x))) if (alpha := _between(x, f, weights, low, high)))]
    square, alpha, beta = min(_at(alpha, x, f, weights) for alpha in knees)
    mean_error = math.sqrt(len(x) / math.fsum(w * f_i * f_i for w, f_i in zip(weights, f, strict=True)))
    misfit = max(1.0, square / (len(x) - 2)) if len(x) > 2 else 1.0
    return SaturationEstimate(alpha, beta, mean_error * math.sqrt(misfit))


def _between(x: list[float], f: list[float], weights: list[float], low: int, high: int) -> float | None:
    """Return the best knee with batches up to x[low] on the slope and those from x[high] on above it; None if it lies
    elsewhere."""
    rising = list(zip(x[:high], f[:high], weights[:high], strict=True))
    slope = math.fsum(w * a * b for a, b, w in rising) / math.fsum(w * a * a for a, _, w in rising)
    flat = math.fsum(w * b for b, w in zip(f[high:], weights[high:], strict=True)) / math.fsum(weights[high:])
    return flat / slope if x[low] < flat / slope < x[high] else None


def _at(alpha: float, x: list[float], f: list[float], weights: list[float]) -> tuple[float, float, float]:
    """Return (weighted sum of squares, alpha, beta) of the best beta for this knee."""
    shape = [min(a / alpha, 1.0) for a in x]
    beta = math.fsum(w * h * b for w, h, b in zip(weights, shape, f, strict=True)) / math.fsum(
        w * h * h for w, h in zip(weights, shape, strict=True)
    )
    return math.fsum(w * (b - beta * h) ** 2 for w, h, b in zip(weights, shape, f, strict=True)), alpha, beta
