from __future__ import annotations

import math

import numpy as np
import pytest
from measured_runs import given

from atoll.controller.deciding.cost_model import expected_step_s, predicted_step_s
from atoll.step_estimators.estimates import RankProfile


def rank(compute_s: float, deviation_s: float, steps: int = 32) -> RankProfile:
    error_s = 1.2533 * deviation_s / math.sqrt(steps)  # of a median
    return RankProfile(plan=1, local_batch=10, compute_s=compute_s, compute_error_s=error_s, steps=steps)


@pytest.mark.parametrize(
    ("means", "deviations"),
    [
        ((0.1, 0.1, 0.1), (0.01, 0.01, 0.01)),
        ((0.1, 0.09, 0.02), (0.02, 0.001, 0.01)),
        ((0.1,) * 50, (0.02,) * 50),
    ],
)
def test_evened_out_ranks_make_a_step_longer_than_any_of_them(
    means: tuple[float, ...], deviations: tuple[float, ...]
) -> None:
    drawn = np.random.default_rng(3).normal(means, deviations, (40_000, len(means))).max(axis=1)
    ranks = [rank(mean, deviation) for mean, deviation in zip(means, deviations, strict=True)]
    assert expected_step_s(ranks, means) == pytest.approx(max(float(np.median(drawn)), *means), rel=0.003)
    assert expected_step_s(ranks, means) >= max(means)


def test_steady_ranks_take_what_the_slowest_takes() -> None:
    assert expected_step_s([rank(0.1, 0.0), rank(0.2, 0.0)], [0.1, 0.2]) == 0.2
    assert expected_step_s([rank(0.1, 0.0)], [0.3]) == 0.3


def test_what_a_step_takes_beyond_its_slowest_rank_stays() -> None:
    profile = given({0: rank(0.1, 0.0)}).profile  # its steps take 0.1 s
    assert predicted_step_s(profile, 0.09, 0.05) == pytest.approx(0.06)
    assert predicted_step_s(profile, 0.3, 0.2) == 0.2
