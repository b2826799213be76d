from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from atoll.controller.estimators.noise import NEEDED_STEPS, PENDING_STEPS, NoiseEstimator
from atoll.step_estimators.sums import NormSums

BATCHES = (4, 12, 48)
DIMENSIONS = 200
TRACE = 1.0


def sampled(step: int, batch: int, local: float, together: float, total: int = sum(BATCHES)) -> tuple[int, NormSums]:
    return step, NormSums(total, int(batch > 0), batch, batch * local, batch * together)


def gradients(rng: np.random.Generator, sqnorm: float, batches: Sequence[int]) -> np.ndarray:
    """Mean gradients of each rank [ranks, DIMENSIONS] where |G|^2 = sqnorm and tr(Sigma) = TRACE."""
    b = np.array(batches, dtype=np.float64)[:, None]
    noise = rng.standard_normal((len(batches), DIMENSIONS)) * np.sqrt(TRACE / DIMENSIONS / b)
    return np.asarray(noise + math.sqrt(sqnorm / DIMENSIONS))


def train(estimator: NoiseEstimator, rng: np.random.Generator, sqnorm: float, steps: range) -> None:
    share = np.array(BATCHES) / sum(BATCHES)
    for step in steps:
        local = gradients(rng, sqnorm, BATCHES)
        together = float(((share @ local) ** 2).sum())
        for batch, gradient in zip(BATCHES, local, strict=True):
            estimator.observe(*sampled(step, batch, float(gradient @ gradient), together))


@pytest.mark.parametrize("sqnorm", [1.0, 0.02])
def test_unequal_batches_are_unbiased_within_three_standard_errors(sqnorm: float) -> None:
    """Of many runs of 60 sampled steps; what the ratio of two noisy means is biased by is of second order."""
    found = []
    for seed in range(60):
        estimator = NoiseEstimator()
        train(estimator, np.random.default_rng(seed), sqnorm, range(0, 600, 10))
        estimate = estimator.estimate()
        assert estimate is not None
        found.append(estimate.noise_scale)
    true = TRACE / sqnorm
    standard_error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - true) < 3 * standard_error + 0.01 * true


@pytest.mark.parametrize("sqnorm", [1.0, 0.05])
def test_the_error_said_is_the_error_made(sqnorm: float) -> None:
    found, said = [], []
    for seed in range(40):
        estimator = NoiseEstimator()
        train(estimator, np.random.default_rng(seed), sqnorm, range(60))
        estimate = estimator.estimate()
        assert estimate is not None
        found.append(estimate.noise_scale)
        said.append(estimate.error)
    made = float(np.std(found) / np.mean(found))
    assert 0.7 * made < float(np.median(said)) < 1.4 * made


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_combine_nothing_learn_from_the_halves_of_their_batches(ranks: int) -> None:
    """1. One worker, or workers that never combine gradients in full. 2. Each tells of the two halves of its own batch,
    one of which may be larger. 3. The scale was never known of either: a batch that climbed once stayed there."""
    found = []
    for seed in range(30):
        rng, estimator = np.random.default_rng(seed), NoiseEstimator()
        for step in range(100):
            batches = [batch + 1 for batch in BATCHES[:ranks]]
            for batch in batches:
                parts = (batch // 2, batch - batch // 2)
                halves = [gradients(rng, 0.5, [part])[0] for part in parts]
                mean = sum(part * half for part, half in zip(parts, halves, strict=True)) / batch
                weighted = sum(part * float(half @ half) for part, half in zip(parts, halves, strict=True))
                told = NormSums(sum(batches), 1, batch, weighted, batch * float(mean @ mean), halves=True)
                estimator.observe(step, told)
        estimate = estimator.estimate()
        assert estimate is not None
        found.append(estimate.noise_scale)
    standard_error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - 2.0) < 3 * standard_error + 0.03


def test_one_rank_that_tells_only_its_own_gradient_says_nothing() -> None:
    estimator = NoiseEstimator()
    for step in range(100):
        estimator.observe(*sampled(step, 8, 1.0 + 0.1 * (step % 3), 1.0 + 0.1 * (step % 3), total=8))
    assert estimator.estimate() is None


def test_a_step_that_not_all_ranks_told_does_not_count() -> None:
    estimator = NoiseEstimator()
    for step in range(200):
        estimator.observe(*sampled(step, 4, 1.2, 1.0))
        estimator.observe(*sampled(step, 12, 1.1, 1.0))
    assert estimator.estimate() is None
    assert len(estimator._pending) == PENDING_STEPS


def test_nothing_is_said_before_enough_steps() -> None:
    estimator, rng = NoiseEstimator(), np.random.default_rng(1)
    train(estimator, rng, 1.0, range(NEEDED_STEPS - 1))
    assert estimator.estimate() is None
    train(estimator, rng, 1.0, range(NEEDED_STEPS - 1, NEEDED_STEPS))
    assert estimator.estimate() is not None


def test_of_a_gradient_that_drowns_in_noise_only_the_least_scale_is_said() -> None:
    """|G|^2 is estimated below zero in half of the steps, and so is its mean every now and then."""
    drowned = 0
    for seed in range(40):
        estimator = NoiseEstimator()
        train(estimator, np.random.default_rng(seed), 0.0, range(50))
        estimate = estimator.estimate()
        if estimate is not None:
            assert 0 < estimate.low <= estimate.noise_scale <= estimate.high
            assert estimate.error > 0.3
            drowned += math.isinf(estimate.high)
    assert drowned > 20


def test_one_exploding_gradient_moves_nothing() -> None:
    calm, hit = NoiseEstimator(), NoiseEstimator()
    for estimator in (calm, hit):
        train(estimator, np.random.default_rng(7), 1.0, range(40))
    for batch in BATCHES:
        hit.observe(*sampled(40, batch, 5e4, 4e4))
    assert hit.estimate() == calm.estimate()


def test_gradients_that_become_smaller_for_good_are_followed() -> None:
    estimator, rng = NoiseEstimator(), np.random.default_rng(8)
    train(estimator, rng, 1.0, range(100))
    train(estimator, rng, 0.1, range(100, 250))
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.noise_scale == pytest.approx(TRACE / 0.1, rel=0.15)


def test_a_rank_without_samples_tells_nothing_and_is_not_waited_for() -> None:
    estimator, rng = NoiseEstimator(), np.random.default_rng(9)
    for step in range(20):
        for batch, gradient in zip((16, 48), gradients(rng, 1.0, (16, 48)), strict=True):
            estimator.observe(*sampled(step, batch, float(gradient @ gradient), 1.0 + TRACE / 64, total=64))
        estimator.observe(*sampled(step, 0, 1.0, 1.0, total=64))
    assert estimator.estimate() is not None
