"""Estimate gamma, t_o and t_u: the overlap of computing and communication, the same for all ranks of a run.

Source: Cannikin (Ma et al., 2024), Eq. 4-6 and section 4.5: gamma by inverse-variance weighting of the ranks' own
means. The paper weights the ranks' synchronisation times alike. But a rank's time includes waiting for slower ranks,
which is no noise with mean zero. The rank that came last to a bucket did not wait. So the least over all ranks counts
for each step, and the median of those over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from statistics import median
from typing import Final

from atoll.controller.estimators.profile import OverlapEstimate
from atoll.step_estimators.estimates import RankEstimate
from atoll.step_estimators.robust import median_error, spread
from atoll.step_estimators.sums import SyncSums, add_ranks

WINDOW_STEPS: Final = 16
NEEDED_STEPS: Final = 5
PENDING_STEPS: Final = 256
"""Steps that are kept until ranks have reported them: ranks report once a second, each at its own moment."""
_MIN_REPORTED_SHARE: Final = 0.9
"""Share of the ranks that must have reported a step: telemetry may be lossy, and one of a thousand ranks always
lacks."""


class OverlapEstimator:
    """Estimator of one run. Bounded: PENDING_STEPS steps."""

    def __init__(self) -> None:
        self._syncs: dict[int, SyncSums] = {}  # by step

    def observe(self, step: int, told: SyncSums) -> None:
        """Add ranks that report a step, their times finite and not negative."""
        add_ranks(self._syncs, step, told, PENDING_STEPS)

    def estimate(self, ranks: Iterable[RankEstimate]) -> OverlapEstimate | None:
        """Return the estimate; None before nearly all ranks reported enough steps, and while no rank measures its
        backward pass.

        ranks: those with any measurement."""
        gamma, count = _gamma(ranks)
        needed = _MIN_REPORTED_SHARE * count
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
    """Return the ranks' means weighted by their inverse variance, and the number of ranks."""
    weight = total = 0.0
    count = 0
    for rank in ranks:
        count += 1
        if rank.gamma_variance > 0:  # infinite before a rank's second step: weight 0
            weight += 1 / rank.gamma_variance
            total += rank.gamma / rank.gamma_variance
    return (total / weight if weight > 0 else None), count
