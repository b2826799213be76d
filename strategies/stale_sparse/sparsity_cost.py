"""Cost of a lower sparsity to the devices: selecting, summing and applying more entries takes their time.

Workers that train on processors report the exchange's time in each step, whatever the batch is and whatever else uses
the processors. It grows with the density. A GPU has nothing to report: the exchange's processors run beside its work.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from atoll.step_estimators.observed import ObservedStep

NEEDED_STEPS: Final = 6
LEAST_CHANGE: Final = 0.001
"""Smallest difference of two densities that counts: the effect of a smaller one drowns in noise."""
KEPT_LEVELS: Final = 4
"""Sparsities whose exchange is remembered, the newest."""
_TOLD_STEPS: Final = 64
"""Steps of all ranks together in a level: each rank carries the same entries."""


class SparsityCostEstimator:
    """Estimator of one run, from the exchange's time on the training processors. Bounded: KEPT_LEVELS sparsities."""

    def __init__(self) -> None:
        self._levels: dict[float, deque[tuple[float, float]]] = {}  # (select_s, apply_s) by sparsity, the newest last

    def observe(self, rank: int, step: ObservedStep) -> None:
        """Observe one more step of a rank; its times are finite and not negative. At sparsity 0 nothing is learned."""
        sparsity, select_s, apply_s = (
            step.strategy_metrics.get(name, 0.0) for name in ("sparsity", "select_s", "apply_s")
        )
        if not (0 < sparsity < 1 and apply_s > 0):
            return
        level = self._levels.pop(sparsity, None) or deque(maxlen=_TOLD_STEPS)
        self._levels[sparsity] = level
        level.append((select_s, apply_s))
        if len(self._levels) > KEPT_LEVELS:
            del self._levels[next(iter(self._levels))]

    def estimate(self) -> float | None:
        """Return dense_s: seconds that a step takes longer with density 1 than with 0, in proportion between.

        It is of the medians c_i (the choice) and a_i (summing, applying) of the steps at density d_i. With the least
        density d_0 and the largest d_1:

            dense_s = sum d_i a_i / sum d_i^2  +  (c_1 - c_0) / (d_1 - d_0)

        Chosen entries alone are summed and applied. The choice reads all entries, and a part of it, encoding, is of the
        chosen ones. Only two densities separate the parts, so one density alone gives the least cost. None before
        enough steps."""
        levels: list[tuple[float, float, float]] = sorted(
            (1 - sparsity, median(select_s), median(apply_s))
            for sparsity, level in self._levels.items()
            if len(level) >= NEEDED_STEPS
            for select_s, apply_s in [zip(*level, strict=True)]
        )
        if not levels:
            return None
        applied_s = sum(d * a for d, _, a in levels) / sum(d * d for d, _, _ in levels)
        (least, c_0, _), (most, c_1, _) = levels[0], levels[-1]
        return applied_s if most - least < LEAST_CHANGE else applied_s + max((c_1 - c_0) / (most - least), 0.0)
