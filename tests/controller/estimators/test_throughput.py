from __future__ import annotations

import math

import pytest

from atoll.controller.estimators.throughput import NEEDED_STEPS, SKIPPED_STEPS, WINDOW_STEPS, Throughput


def observed(times: list[float], plan: int = 1, batch: int = 10, first: int = 1) -> Throughput:
    seen = Throughput()
    for step, compute_s in enumerate(times, first):
        seen = seen.observe(step, plan, batch, compute_s)
    return seen


def test_nothing_is_said_before_enough_steps() -> None:
    assert observed([0.1] * (SKIPPED_STEPS + NEEDED_STEPS - 1)).estimate() is None
    estimate = observed([0.1] * (SKIPPED_STEPS + NEEDED_STEPS)).estimate()
    assert estimate is not None
    assert (estimate.seconds_per_sample, estimate.error, estimate.steps) == (pytest.approx(0.01), 0.0, NEEDED_STEPS)


def test_the_first_steps_of_a_run_do_not_count() -> None:
    estimate = observed([9.0, 9.0] + [0.1] * NEEDED_STEPS).estimate()
    assert estimate is not None
    assert estimate.seconds_per_sample == pytest.approx(0.01)


def test_one_pause_moves_nothing() -> None:
    estimate = observed([0.1] * 10 + [30.0] + [0.1] * 4).estimate()
    assert estimate is not None
    assert estimate.seconds_per_sample == pytest.approx(0.01)


def test_a_device_that_slows_down_is_noticed_within_a_window() -> None:
    estimate = observed([0.1] * 100 + [0.3] * (WINDOW_STEPS // 2 + 1)).estimate()
    assert estimate is not None
    assert estimate.seconds_per_sample == pytest.approx(0.03)


def test_a_new_plan_begins_a_new_window() -> None:
    seen = observed([0.1] * 20)
    after = seen.observe(21, 2, 20, 0.4)
    assert after.estimate() is None
    assert (after.plan, after.window) == (2, (0.02,))


def test_repeated_older_and_senseless_samples_change_no_estimate() -> None:
    seen = observed([0.1] * 20)
    assert seen.observe(20, 1, 10, 5.0) is seen
    assert seen.observe(3, 1, 10, 5.0) is seen
    assert seen.observe(99, 0, 10, 5.0) is seen
    for batch, compute_s in ((0, 0.1), (10, math.nan), (10, math.inf), (10, -1.0), (10, 0.0)):
        assert seen.observe(21, 1, batch, compute_s).window == seen.window


def test_spread_becomes_uncertainty() -> None:
    estimate = observed([0.1, 0.1, *[0.08, 0.12] * 8]).estimate()
    assert estimate is not None
    assert estimate.seconds_per_sample == pytest.approx(0.01)
    assert estimate.error == pytest.approx(1.4826 * 0.002 / 4)
