from __future__ import annotations

import random
import statistics
from statistics import median

import pytest

from atoll.step_estimators.robust import ChangeDetector, ClippedMean, median_error, spread


@pytest.mark.parametrize("count", [5, 16, 200])
def test_the_spread_of_normal_noise_is_its_standard_deviation(count: int) -> None:
    rng = random.Random(1)
    found = []
    for _ in range(3000):
        values = [rng.gauss(10, 2) for _ in range(count)]
        found.append(spread(values, median(values)))
    assert statistics.fmean(found) == pytest.approx(2, rel=0.06)


def test_a_single_value_has_no_spread() -> None:
    assert spread([7.0], 7.0) == 0


def test_the_error_of_the_median_is_that_of_many_medians() -> None:
    rng = random.Random(2)
    medians = [median([rng.gauss(0, 1) for _ in range(25)]) for _ in range(4000)]
    assert median_error(1.0, 25) == pytest.approx(statistics.pstdev(medians), rel=0.05)


def test_three_outliers_in_a_row_are_no_change_and_four_are() -> None:
    detector = ChangeDetector()
    assert [detector.observe(step, 2.0, 0.02, 0.0) for step in range(10, 14)] == [False, False, False, True]
    assert detector.suspects_from(13) == 10


@pytest.mark.parametrize("change", [-0.4, -0.1, 0.1, 0.4])
def test_a_change_is_told_with_the_step_it_began_with(change: float) -> None:
    rng = random.Random(3)
    detector = ChangeDetector()
    assert not any(detector.observe(step, rng.gauss(0, 0.02), 0.02, 0.0) for step in range(200))
    told = next(step for step in range(200, 220) if detector.observe(step, rng.gauss(change, 0.02), 0.02, 0.0))
    assert told < 210
    assert abs(detector.suspects_from(told) - 200) <= 2


def test_noise_alone_is_hardly_ever_a_change() -> None:
    rng = random.Random(4)
    told = 0
    for noise in (0.01, 0.05, 0.2):
        detector = ChangeDetector()
        for step in range(10_000):
            if detector.observe(step, rng.gauss(0, noise), noise, 0.0):
                told += 1
                detector.reset()
    assert told <= 3


def test_a_clipped_mean_is_the_mean_and_forgets() -> None:
    rng = random.Random(5)
    mean = ClippedMean()
    for _ in range(200):
        mean.observe(rng.gauss(0.2, 0.01))
    assert mean.mean == pytest.approx(0.2, abs=0.01)
    assert mean.variance_of_mean() == pytest.approx(0.01**2 * 0.1 / 1.9, rel=0.6)
    for _ in range(60):
        mean.observe(rng.gauss(0.4, 0.01))
    assert mean.mean == pytest.approx(0.4, abs=0.02)


def test_one_outlier_moves_a_clipped_mean_by_less_than_the_spread() -> None:
    rng = random.Random(6)
    mean = ClippedMean()
    for _ in range(100):
        mean.observe(rng.gauss(0.2, 0.01))
    before = mean.mean
    mean.observe(1.0)
    assert abs(mean.mean - before) < 0.01


def test_a_clipped_mean_of_equal_values_can_still_move() -> None:
    mean = ClippedMean()
    for value in [0.5] * 50 + [0.6] * 200:
        mean.observe(value)
    assert mean.mean == pytest.approx(0.6, rel=0.01)
