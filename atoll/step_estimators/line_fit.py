"""Fits the line of a device's step time over its local batch.

Source: Cannikin (Ma et al., 2024), Eq. 1-3, for the two lines; weights and prior are ours.
"""

from __future__ import annotations

import math
from operator import mul
from typing import Final, NamedTuple

from atoll.step_estimators.estimates import NodeEstimate

_LEAST_SLOPE: Final = 0.01
"""Samples take at least this part of the time: planners need q + k > 0."""
_AROUND: Final = 0.2
"""The error is that of a prediction this part below and above the newest batch: about as far as a plan moves it."""
_LIKELY_SLOPE: Final = 0.75
_SLOPE_DOUBT: Final = 0.3
"""Prior until two distant batches were measured: a share _LIKELY_SLOPE of the time at the mean batch, give or take
_SLOPE_DOUBT, scales with the samples; in Eq. 8, which serves until then, all of it does. From batches near each
other noise alone could say that samples are free, and a planner would give such a device all of them."""


class BatchLevel(NamedTuple):
    """Seconds; compute_s: of both together. error: its relative standard error."""

    others_s: float
    backward_s: float
    compute_s: float
    error: float

    def times(self, others: float, backward: float, error: float) -> BatchLevel:
        others_s, backward_s = self.others_s * others, self.backward_s * backward
        return BatchLevel(others_s, backward_s, others_s + backward_s, error)


def fit_line(levels: list[tuple[int, BatchLevel]], newest: int) -> NodeEstimate:
    """Weighted least squares with a prior of the slopes, each coefficient at least 0; two distinct batches or more.

    With w_i = 1 / (error_i T_i)^2, means m over w, y the time of a part (load, forward and update, or backward):

        slope = (sum w_i (b_i - m_b) y_i + p slope_0) / (sum w_i (b_i - m_b)^2 + p),  intercept = m_y - slope m_b
        slope_0 = _LIKELY_SLOPE m_y / m_b,  p = (m_b / (_SLOPE_DOUBT m_T))^2
    """
    # Plain sums, as a controller does this for a thousand ranks every second.
    weights = [1 / (level.error * level.compute_s) ** 2 for _, level in levels]
    weight = sum(weights)

    def mean(values: list[float]) -> float:
        return float(sum(map(mul, weights, values)) / weight)

    mean_b = mean([batch for batch, _ in levels])
    others, backward = [level.others_s for _, level in levels], [level.backward_s for _, level in levels]
    mean_a, mean_p = mean(others), mean(backward)
    off = [batch - mean_b for batch, _ in levels]
    weighted_off = list(map(mul, weights, off))
    lever = sum(map(mul, weighted_off, off))
    prior = (mean_b / (_SLOPE_DOUBT * (mean_a + mean_p))) ** 2
    from_origin = lever + weight * mean_b * mean_b

    def line(values: list[float], mean_y: float) -> tuple[float, float]:
        """Return slope and intercept of the best line, or of the best of those with neither negative."""
        with_y = sum(map(mul, weighted_off, values))
        slope = (with_y + prior * _LIKELY_SLOPE * mean_y / mean_b) / (lever + prior)
        if slope <= 0:
            return 0.0, mean_y
        intercept = mean_y - slope * mean_b
        if intercept >= 0:
            return slope, intercept
        return (with_y + weight * mean_b * mean_y) / from_origin, 0.0

    q, s = line(others, mean_a)
    k, m = line(backward, mean_p)
    low, high = levels[0][0], levels[-1][0]
    least = _LEAST_SLOPE * ((q + k) * high + s + m) / high
    if q + k < least:
        more = least - (q + k)
        q, s = q + more, max(s - more * high, 0.0)
    slope, intercept = q + k, s + m
    misfit = 1.0
    if len(levels) > 2:
        squares = [(level.compute_s - slope * batch - intercept) ** 2 for batch, level in levels]
        misfit = max(1.0, sum(map(mul, weights, squares)) / (len(levels) - 2))
    # Both lines have the same weights, so their sum is the line of the sums.
    below, above = max(newest * (1 - _AROUND), 1.0), max(newest * (1 + _AROUND), 1.0)
    error = max(
        math.sqrt(1 / weight + (below - mean_b) ** 2 / (lever + prior)) / (slope * below + intercept),
        math.sqrt(1 / weight + (above - mean_b) ** 2 / (lever + prior)) / (slope * above + intercept),
    )
    error *= math.sqrt(misfit)
    return NodeEstimate(q=q, s=s, k=k, m=m, error=error, low_batch=low, high_batch=high)
