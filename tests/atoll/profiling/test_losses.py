"""Losses of a trial: every sample counts alike, whatever rank and batch it was in."""

from __future__ import annotations

import math

import pytest

from atoll.profiling.trials import SMOOTHING, StepLoss, mean, smoothed, whole_batches


def test_ranks_count_by_their_samples_and_one_without_samples_does_not_count() -> None:
    first = [StepLoss(0, 30, 1.0), StepLoss(1, 40, 2.0)]
    second = [StepLoss(0, 10, 5.0), StepLoss(1, 0, math.nan)]
    assert whole_batches([first, second]) == [(40, 2.0), (40, 2.0)]
    assert mean([(40, 2.0), (10, 7.0)]) == 3.0
    assert math.isnan(mean([]))


def test_a_constant_loss_is_its_own_smoothed_value_from_the_first_step() -> None:
    assert smoothed([(64, 0.7)], 64) == pytest.approx(0.7)
    assert smoothed([(64, 0.7)] * 500, 64) == pytest.approx(0.7)


def test_with_the_reference_batch_it_is_the_papers_rule_without_its_start_at_zero() -> None:
    losses = [1 / step for step in range(1, 400)]
    printed = 0.0
    for loss in losses:
        printed = SMOOTHING * printed + (1 - SMOOTHING) * loss
    found = smoothed([(32, loss) for loss in losses], 32)
    assert found == pytest.approx(printed / (1 - SMOOTHING ** len(losses)))


def test_a_batch_twice_as_large_counts_like_two_batches() -> None:
    by_ones = smoothed([(32, loss) for loss in (3.0, 3.0, 2.0, 2.0, 1.0, 1.0)], 32)
    assert smoothed([(64, 3.0), (64, 2.0), (64, 1.0)], 32) == pytest.approx(by_ones)


def test_a_loss_that_is_no_number_is_not_smoothed_away() -> None:
    assert math.isnan(smoothed([(8, 1.0), (8, math.nan), (8, 1.0)], 8))
    assert smoothed([(8, 1.0), (8, math.inf)], 8) == math.inf
