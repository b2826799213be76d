"""Estimate the gradient noise scale over a run's steps: average trace and squared norm of sampled steps, then divide.

Sources: planners/batches/gns.py for one step of ranks with unequal batches (the pooled form); AdaptDL / Pollux (Qiao et
al., 2021) for smoothing both parts before dividing. Two halves of a batch stand for two ranks if ranks do not combine
gradients."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import median
from typing import Final

from atoll.controller.estimators.profile import NoiseEstimate
from atoll.controller.planners.batches.gns import pooled
from atoll.step_estimators.robust import spread
from atoll.step_estimators.sums import NormSums, add_ranks

DECAY: Final = 0.96
"""Weight of the earlier steps at each new sampled step: about 50 of them count."""
NEEDED_STEPS: Final = 5
PENDING_STEPS: Final = 16
_MAX_SQNORM: Final = 1e120
"""Bound on a trace or squared norm: their squares and sums are float64 numbers."""
_OUTLIER_SPREADS: Final = 10.0
"""Spreads from the median beyond which a step is left out, unless the step before it was too."""


class NoiseEstimator:
    """Estimator of one run. Bounded: PENDING_STEPS steps, and a few sums."""

    def __init__(self) -> None:
        self._pending: dict[int, NormSums] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=PENDING_STEPS)
        self._skipped = False
        self._steps = 0
        self._weight = self._weight_square = 0.0
        # Sums with weights that decay: trace, sqnorm, their squares and product.
        self._sums = [0.0] * 5

    def observe(self, step: int, told: NormSums) -> None:
        """Add ranks that sampled a step: squared norms of their gradients and of the combined gradient, or of the
        halves of each one's batch if ranks combine none."""
        sampled = add_ranks(self._pending, step, replace(told), PENDING_STEPS)
        if sampled.samples < sampled.total_batch:
            return
        del self._pending[step]
        if not sampled.samples == sampled.total_batch > 0:
            return
        ranks, weighted, combined = sampled.ranks, sampled.weighted, sampled.combined
        if sampled.halves:
            self._add(*pooled(2 * ranks, sampled.samples, weighted, combined, groups=ranks))
        elif ranks > 1:
            self._add(*pooled(ranks, sampled.samples, weighted, combined))

    @property
    def steps(self) -> int:
        """Number of sampled steps with a valid sample."""
        return self._steps

    def _add(self, trace: float, sqnorm: float) -> None:
        if not (abs(trace) <= _MAX_SQNORM and abs(sqnorm) <= _MAX_SQNORM):  # NaN too
            return
        self._recent.append((trace, sqnorm))
        if self._is_outlier() and not self._skipped:
            self._skipped = True
            return
        self._skipped = False
        self._steps += 1
        self._weight = DECAY * self._weight + 1
        self._weight_square = DECAY * DECAY * self._weight_square + 1
        values = (trace, sqnorm, trace * trace, sqnorm * sqnorm, trace * sqnorm)
        self._sums = [DECAY * known + new for known, new in zip(self._sums, values, strict=True)]

    def _is_outlier(self) -> bool:
        if len(self._recent) < PENDING_STEPS // 2:
            return False
        for values in zip(*self._recent, strict=True):
            centre = median(values)
            if abs(values[-1] - centre) > _OUTLIER_SPREADS * max(spread(values, centre), 1e-6 * abs(centre)):
                return True
        return False

    def estimate(self) -> NoiseEstimate | None:
        """Return the ratio of two weighted means, and its error by the delta method. With S = tr(Sigma), G = |G|^2 of a
        step:

            phi = mean(S) / mean(G),  var(mean) = var(S) * share,  share = (sum w^2 / (sum w)^2) / (1 - the same)
            (error / phi)^2 = var(S) / S^2 + var(G) / G^2 - 2 cov(S, G) / (S G)      (of the means)
            low, high = mean(S) / (mean(G) +- 2 sigma(G))

        None before enough sampled steps, and if they contradict each other: a trace, or a squared norm with all its
        doubt, below 0. Source: McCandlish et al., 2018, appendix A.1, for phi; the smoothing is AdaptDL's."""
        if self._steps < NEEDED_STEPS:
            return None
        trace, sqnorm, traces, sqnorms, products = (total / self._weight for total in self._sums)
        # Of weighted means: variance of one step over the number of steps that the weights are worth.
        share = self._weight_square / self._weight**2
        share /= 1 - share
        of_trace = max(traces - trace**2, 0.0) * share
        of_sqnorm = max(sqnorms - sqnorm**2, 0.0) * share
        both = (products - trace * sqnorm) * share
        doubt = 2 * math.sqrt(of_sqnorm)
        if not trace > 0 or not sqnorm + doubt > 0:
            return None
        low = trace / (sqnorm + doubt)
        if sqnorm <= doubt / 2:
            return NoiseEstimate(noise_scale=low, error=math.inf, low=low, high=math.inf, steps=self._steps)
        square = of_trace / trace / trace + of_sqnorm / sqnorm / sqnorm - 2 * both / trace / sqnorm
        return NoiseEstimate(
            noise_scale=trace / sqnorm,
            error=math.sqrt(max(square, 0.0)),
            low=low,
            high=trace / (sqnorm - doubt) if sqnorm > doubt else math.inf,
            steps=self._steps,
        )
