"""Cost model of a step: its time with given batches, by Cannikin's Eq. 7, for ranks whose times vary by step.

A step ends with its slowest rank. With an unequal split that is always the same rank. With an even one it is another
rank in every step, and the step takes longer than any rank does on average. A prediction that ignores this promises too
much, and the more the better the split is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from atoll.controller.estimators.profile import OverlapEstimate, Profile
from atoll.controller.planners.batches.optperf import step_lines
from atoll.step_estimators.estimates import NodeEstimate, RankProfile, StepLine

NO_OVERLAP: Final = OverlapEstimate(gamma=0.0, t_o=0.0, t_u=0.0, error_s=0.0)
ERROR_DISTANCE: Final = 0.2
"""Distance of the prediction that a NodeEstimate's error is of, as a share of the rank's newest batch."""
_MAX_DEVIATIONS: Final = 6.0
"""A rank that is so many standard deviations faster than another is never the slowest."""
_MAX_ITERATIONS: Final = 40
_TOLERANCE: Final = 1e-9
"""Largest error of the logarithm of a probability."""
_LOG_2: Final = math.log(2)
_SQRT_2_PI: Final = math.sqrt(2 * math.pi)


def rank_times(lines: Sequence[StepLine], overlap: OverlapEstimate | None, batches: Sequence[int]) -> list[float]:
    """Return the time until each rank's step ends, were it alone with its communication, in seconds (Eq. 7)."""
    known = overlap or NO_OVERLAP
    qskm_N4 = np.array([(e.q, e.s, e.k, e.m) for e in lines], dtype=np.float64)
    slope_2N, offset_2N = step_lines(qskm_N4, known.gamma, known.t_o, known.t_u)
    times_s: list[float] = (slope_2N * np.array(batches) + offset_2N).max(axis=0).tolist()
    return times_s


def expected_step_s(ranks: Sequence[RankProfile], times_s: Sequence[float]) -> float:
    """Return the median of the slowest rank's time. Each time is normal around times_s, with the measured deviation:

    the t with  prod_i Phi((t - T_i) / sigma_i) = 1/2

    Newton's method on the logarithm of the product, which is concave: from the left each step stays on the left."""
    from scipy.special import ndtr  # here: loading it takes longer than most processes that import this decide anything

    times_N = np.array(times_s, dtype=np.float64)
    deviations_N = times_N * np.array([_relative_deviation(rank) for rank in ranks])
    at_s = float(times_N.max())
    close_N = (deviations_N > 0) & (times_N + _MAX_DEVIATIONS * deviations_N > at_s)
    times_N, deviations_N = times_N[close_N], deviations_N[close_N]
    for _ in range(_MAX_ITERATIONS if len(times_N) else 0):
        z_N = (at_s - times_N) / deviations_N
        done_N = ndtr(z_N)
        short = float(np.log(done_N).sum()) + _LOG_2
        if short > -_TOLERANCE:
            break
        at_s -= short * _SQRT_2_PI / float((np.exp(-0.5 * z_N * z_N) / (done_N * deviations_N)).sum())
    return at_s


def predicted_step_s(profile: Profile, now_s: float, then_s: float) -> float:
    """Predict a step's time after a change that takes the slowest rank from now_s to then_s.

    A step takes longer than its slowest rank (the boundary, messages to the agent); that difference was measured with
    the present plan and stays. A step that seems shorter than its slowest rank was measured before that became slow."""
    return then_s + max(profile.step_s - now_s, 0.0)


def change_uncertainty_s(
    ranks: Sequence[RankProfile], estimates: Sequence[NodeEstimate], batches: Sequence[int]
) -> list[float]:
    """Return two standard errors of the change of each rank's time with these batches, in seconds:

        2 error_i T_i(b_i) |b_i - now_i| / (0.2 now_i)

    The time with the present batch is measured, so only the model's change away from it is uncertain. A NodeEstimate's
    error is that of a prediction ERROR_DISTANCE away and grows with the distance. Synchronisation stays the same."""
    distances = [
        abs(batch - rank.local_batch) / max(ERROR_DISTANCE * rank.local_batch, 1.0)
        for rank, batch in zip(ranks, batches, strict=True)
    ]
    return [2 * e.error * e.compute_s(b) * far for e, b, far in zip(estimates, batches, distances, strict=True)]


def least_step_s(estimates: Sequence[NodeEstimate], total: int) -> float:
    """Return the time in which all ranks compute `total` samples together and end at once, in seconds: the T with

    sum_i (T - s_i - m_i) / (q_i + k_i) = total
    """
    per_s = [1 / (e.q + e.k) for e in estimates]
    fixed = math.fsum((e.s + e.m) * each for e, each in zip(estimates, per_s, strict=True))
    return (total + fixed) / math.fsum(per_s)


def is_near_best(times_s: Sequence[float], least_s: float, gain: float) -> bool:
    """Return True if no split can shorten the step by `gain`, so that the planner need not run.

    least_s: the ranks' time, were the batch split so that all end at once. A step is longer than its ranks' times by
    their unsteadiness, in proportion. So if none takes longer than least_s / (1 - gain), a step in which all take
    least_s is no shorter than (1 - gain) of the present one."""
    return max(times_s) * (1 - gain) <= least_s


def _relative_deviation(rank: RankProfile) -> float:
    """Return the relative standard deviation of the rank's compute time, from the error of its median."""
    if rank.compute_s <= 0:
        return 0.0
    return rank.compute_error_s * math.sqrt(rank.steps) / 1.2533 / rank.compute_s
