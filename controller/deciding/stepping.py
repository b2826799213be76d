"""The time of a step with some batches: Cannikin's Eq. 7, for ranks that do not take equally long each time.

A step ends with its slowest rank. Where batches are unequal that is always the same one; where they were evened out it
is another one in every step, and the step takes longer than any rank does on average. A prediction without that
promises too much, and the more so the better the split is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from atoll.controller.estimators.profile import OverlapEstimate, Profile
from atoll.step_estimators.estimates import NodeEstimate, RankProfile

NO_OVERLAP: Final = OverlapEstimate(gamma=0.0, t_o=0.0, t_u=0.0, error_s=0.0)
_FAR: Final = 6.0
"""Deviations: a rank that is so much faster than another is never the slowest."""
_ROUNDS: Final = 40
_EXACT: Final = 1e-9
"""Of the logarithm of a probability."""
_LOG_2: Final = math.log(2)
_SQRT_2_PI: Final = math.sqrt(2 * math.pi)


def rank_times(
    estimates: Sequence[NodeEstimate], overlap: OverlapEstimate | None, batches: Sequence[int]
) -> list[float]:
    """Seconds until each rank's step ends, were it alone with its communication:

        T_i(b) = max(q b + s + k b + m + t_u,  q b + s + gamma (k b + m) + t_o + t_u)

    Source: Cannikin, Eq. 7."""
    known = overlap or NO_OVERLAP
    return [
        max(
            e.compute_s(b) + known.t_u,
            e.q * b + e.s + known.gamma * (e.k * b + e.m) + known.t_o + known.t_u,
        )
        for e, b in zip(estimates, batches, strict=True)
    ]


def expected_step_s(ranks: Sequence[RankProfile], times_s: Sequence[float]) -> float:
    """Median of the slowest rank's time, where each is normal around times_s and as unsteady as it was measured:

    the t with  prod_i Phi((t - T_i) / sigma_i) = 1/2

    Newton's method on the logarithm of the product, which is concave: from the left each step stays on the left."""
    from scipy.special import ndtr  # here: loading it takes longer than most processes that import this decide anything

    times_N = np.array(times_s, dtype=np.float64)
    deviations_N = times_N * np.array([_unsteadiness(rank) for rank in ranks])
    at_s = float(times_N.max())
    close_N = (deviations_N > 0) & (times_N + _FAR * deviations_N > at_s)
    times_N, deviations_N = times_N[close_N], deviations_N[close_N]
    for _ in range(_ROUNDS if len(times_N) else 0):
        z_N = (at_s - times_N) / deviations_N
        done_N = ndtr(z_N)
        short = float(np.log(done_N).sum()) + _LOG_2
        if short > -_EXACT:
            break
        at_s -= short * _SQRT_2_PI / float((np.exp(-0.5 * z_N * z_N) / (done_N * deviations_N)).sum())
    return at_s


def predicted(profile: Profile, now_s: float, then_s: float) -> float:
    """A step's time after a change that takes the slowest rank from now_s to then_s.

    What a step takes beyond its slowest rank (the boundary, talking to the agent) was measured with the present plan
    and stays. Steps that seem shorter than their slowest rank were measured before it became slow."""
    return then_s + max(profile.step_s - now_s, 0.0)


def _unsteadiness(rank: RankProfile) -> float:
    """Relative standard deviation of its computing, from the error of its median."""
    if rank.compute_s <= 0:
        return 0.0
    return rank.compute_error_s * math.sqrt(rank.steps) / 1.2533 / rank.compute_s
