"""Estimates gamma, t_o and t_u: the overlap of computing and communication, the same for all ranks of a run.

Source: Cannikin (Ma et al., 2024), Eq. 4-6 and section 4.5: gamma by inverse-variance weighting of the ranks' own
means. The paper weights the ranks' times of synchronisation alike; but what a rank measures of those includes waiting
for slower ranks, which is no noise with mean zero. The rank that came last to a bucket waited for nobody, so of each
step the least over all ranks counts, and of those the median over steps.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Final

from atoll.controller.estimators.observed import ObservedStep
from atoll.controller.estimators.profile import OverlapEstimate
from atoll.controller.estimators.robust import ClippedMean, median, median_error, spread

WINDOW_STEPS: Final = 16
NEEDED_STEPS: Final = 5
PENDING_STEPS: Final = 256
"""Ranks tell their steps once a second, each at its own moment: of fast steps many are under way."""
_HEARD: Final = 0.9
"""Share of the ranks that must have told a step: telemetry may be lossy, and of a thousand ranks one always is."""


class OverlapEstimator:
    """Of one run. Bounded: PENDING_STEPS steps and one mean a rank."""

    def __init__(self) -> None:
        self._gammas: dict[int, ClippedMean] = {}
        self._ranks: set[int] = set()
        self._syncs: dict[int, tuple[int, float, float]] = {}  # by step: ranks heard, least sync_s, least last_sync_s

    def observe(self, rank: int, observed: ObservedStep) -> None:
        """One more step of a rank, its times finite and not negative."""
        self._ranks.add(rank)
        if 0 < observed.first_bucket_s <= observed.backward_s:
            gamma = self._gammas.get(rank)
            if gamma is None:
                gamma = self._gammas[rank] = ClippedMean()
            gamma.observe(observed.first_bucket_s / observed.backward_s)
        known = self._syncs.get(observed.step)
        if known is not None:
            heard, sync_s, last_sync_s = known
            self._syncs[observed.step] = (
                heard + 1,
                min(sync_s, observed.sync_s),
                min(last_sync_s, observed.last_sync_s),
            )
            return
        if len(self._syncs) == PENDING_STEPS:
            del self._syncs[next(iter(self._syncs))]
        self._syncs[observed.step] = (1, observed.sync_s, observed.last_sync_s)

    def estimate(self) -> OverlapEstimate | None:
        """None before enough steps were told by nearly all ranks, and while no rank measures its backward pass."""
        gamma = self._gamma()
        needed = _HEARD * len(self._ranks)
        told = (each for each in reversed(self._syncs.values()) if each[0] >= needed)
        newest = list(islice(told, WINDOW_STEPS))
        if gamma is None or len(newest) < NEEDED_STEPS:
            return None
        t_o = [sync_s for _, sync_s, _ in newest]
        t_u = [last_sync_s for _, _, last_sync_s in newest]
        middle_o, middle_u = median(t_o), median(t_u)
        deviation = math.hypot(spread(t_o, middle_o), spread(t_u, middle_u))
        return OverlapEstimate(gamma=gamma, t_o=middle_o, t_u=middle_u, error_s=median_error(deviation, len(newest)))

    def _gamma(self) -> float | None:
        weight = total = 0.0
        for gamma in self._gammas.values():
            variance = gamma.variance_of_mean()
            if variance > 0:  # infinite before a rank's second step: weight 0
                weight += 1 / variance
                total += gamma.mean / variance
        return total / weight if weight > 0 else None
