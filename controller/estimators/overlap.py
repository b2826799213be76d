"""Estimates gamma, t_o and t_u: the overlap of computing and communication, the same for all ranks of a run.

Source: Cannikin (Ma et al., 2024), Eq. 4-6 and section 4.5: gamma by inverse-variance weighting of the ranks' own
means. The paper weights the ranks' times of synchronisation alike; but what a rank measures of those includes waiting
for slower ranks, which is no noise with mean zero. The rank that came last to a bucket waited for nobody, so of each
step the least over all ranks counts, and of those the median over steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Final

from atoll.controller.estimators.profile import OverlapEstimate
from atoll.step_estimators.estimates import RankEstimate
from atoll.step_estimators.robust import median, median_error, spread
from atoll.step_estimators.sums import SyncSums

WINDOW_STEPS: Final = 16
NEEDED_STEPS: Final = 5
PENDING_STEPS: Final = 256
"""Ranks tell their steps once a second, each at its own moment: of fast steps many are under way."""
_HEARD: Final = 0.9
"""Share of the ranks that must have told a step: telemetry may be lossy, and of a thousand ranks one always is."""


class OverlapEstimator:
    """Of one run. Bounded: PENDING_STEPS steps."""

    def __init__(self) -> None:
        self._syncs: dict[int, SyncSums] = {}  # by step

    def observe(self, step: int, told: SyncSums) -> None:
        """More ranks tell of a step, their times finite and not negative."""
        known = self._syncs.get(step)
        if known is not None:
            self._syncs[step] = known.with_ranks_of(told)
            return
        if len(self._syncs) == PENDING_STEPS:
            del self._syncs[next(iter(self._syncs))]
        self._syncs[step] = told

    def estimate(self, ranks: Iterable[RankEstimate]) -> OverlapEstimate | None:
        """None before enough steps were told by nearly all ranks, and while no rank measures its backward pass.

        ranks: those that measured anything."""
        gamma, count = _gamma(ranks)
        needed = _HEARD * count
        told = (each for each in reversed(self._syncs.values()) if each.ranks >= needed)
        newest = list(islice(told, WINDOW_STEPS))
        if gamma is None or len(newest) < NEEDED_STEPS:
            return None
        t_o = [each.sync_s for each in newest]
        t_u = [each.last_sync_s for each in newest]
        middle_o, middle_u = median(t_o), median(t_u)
        deviation = math.hypot(spread(t_o, middle_o), spread(t_u, middle_u))
        return OverlapEstimate(gamma=gamma, t_o=middle_o, t_u=middle_u, error_s=median_error(deviation, len(newest)))


def _gamma(ranks: Iterable[RankEstimate]) -> tuple[float | None, int]:
    """The ranks' means weighted by how sure each is, and how many ranks there are."""
    weight = total = 0.0
    count = 0
    for rank in ranks:
        count += 1
        if rank.gamma_variance > 0:  # infinite before a rank's second step: weight 0
            weight += 1 / rank.gamma_variance
            total += rank.gamma / rank.gamma_variance
    return (total / weight if weight > 0 else None), count
