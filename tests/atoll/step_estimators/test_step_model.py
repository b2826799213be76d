from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.step_estimators.estimates import NodeEstimate
from atoll.step_estimators.step_model import KEPT_BATCHES, NEEDED_STEPS, WINDOW_STEPS, StepModel

Q, S, K, M = 2e-3, 20e-3, 4e-3, 10e-3


class Device:
    """Feeds a model with steps of a device that follows the model exactly, times noise."""

    def __init__(
        self, coefficients: tuple[float, float, float, float] = (Q, S, K, M), *, noise: float = 0.0, seed: int = 1
    ) -> None:
        self.model = StepModel()
        self.step = 0
        self.speed = 1.0
        self.coefficients = coefficients
        self._noise, self._rng = noise, random.Random(seed)
        self.changes: list[int] = []

    def run(self, batch: int, steps: int, outlier: Callable[[int], float] = lambda _: 1.0) -> None:
        q, s, k, m = self.coefficients
        for i in range(steps):
            self.step += 1
            factor = self._rng.lognormvariate(0, self._noise) * outlier(i) / self.speed
            since = self.model.observe(self.step, batch, factor * (q * batch + s), factor * (k * batch + m))
            if since is not None:
                self.changes.append(since)

    def takes(self, batch: float) -> float:
        q, s, k, m = self.coefficients
        return ((q + k) * batch + s + m) / self.speed

    def estimate(self) -> NodeEstimate:
        found = self.model.estimate()
        assert found is not None
        return found

    def off(self, batch: float) -> float:
        """How far the prediction is off, as a share."""
        return abs(self.estimate().compute_s(batch) / self.takes(batch) - 1)


@settings(deadline=None)
@given(
    q=st.floats(0, 1e-2), s=st.floats(0, 0.1), k=st.floats(1e-4, 1e-2), m=st.floats(0, 0.1), batches=st.sets(
        st.integers(1, 500), min_size=2, max_size=KEPT_BATCHES
    ),
)  # fmt: skip
def test_without_noise_the_coefficients_are_found(q: float, s: float, k: float, m: float, batches: set[int]) -> None:
    device = Device((q, s, k, m))
    for batch in sorted(batches):
        device.run(batch, NEEDED_STEPS)
    for batch in batches:
        assert device.off(batch) < 0.02
    if max(batches) > 1.5 * min(batches) and not device.changes:
        found = device.estimate()
        assert found.s == pytest.approx(s, abs=0.02 * device.takes(max(batches)))
        assert found.m == pytest.approx(m, abs=0.02 * device.takes(max(batches)))


def test_one_batch_makes_no_model_and_two_do() -> None:
    device = Device()
    device.run(32, 50)
    assert device.model.estimate() is None
    device.run(48, NEEDED_STEPS - 1)
    assert device.model.estimate() is None
    device.run(48, 1)
    assert device.estimate() == NodeEstimate(
        q=pytest.approx(Q, rel=0.01), s=pytest.approx(S, rel=0.01), k=pytest.approx(K, rel=0.01),
        m=pytest.approx(M, rel=0.02),
        error=device.estimate().error, low_batch=32, high_batch=48,
    )  # fmt: skip


@pytest.mark.parametrize("noise", [0.03, 0.05])
def test_the_step_of_a_batch_never_seen_is_predicted_within_seven_percent(noise: float) -> None:
    """The paper: 3 to 7 %. Here with one step in twenty three times as long."""
    off = []
    for seed in range(100):
        device = Device(noise=noise, seed=seed)
        outliers = random.Random(seed).choices([1.0, 3.0], [0.95, 0.05], k=20)
        for batch in (32, 48, 64):
            device.run(batch, 20, outlier=outliers.__getitem__)
        off += [device.off(batch) for batch in (24, 40, 56, 80)]
    assert statistics.quantiles(off, n=20)[-1] < 0.07


def test_the_error_said_is_the_error_made() -> None:
    """A fifth above the newest batch, which is what the error is said for. Neither too sure nor too unsure."""
    off, said = [], []
    for seed in range(150):
        device = Device(noise=0.04, seed=seed)
        device.run(32, 16)
        device.run(64, 16)
        off.append(device.estimate().compute_s(1.2 * 64) / device.takes(1.2 * 64) - 1)
        said.append(device.estimate().error)
    assert 0.6 < statistics.pstdev(off) / statistics.median(said) < 1.5


def test_close_batches_are_a_wide_error() -> None:
    close, far = Device(noise=0.03), Device(noise=0.03)
    for device, second in ((close, 33), (far, 64)):
        device.run(32, 16)
        device.run(second, 16)
    assert close.estimate().error > 1.5 * far.estimate().error


def test_of_close_batches_noise_alone_does_not_say_that_samples_are_free() -> None:
    """Least squares alone would find any slope, and be cut off at 0 every other time."""
    for seed in range(50):
        device = Device(noise=0.1, seed=seed)
        device.run(32, 8)
        device.run(33, 8)
        found = device.estimate()
        assert min(found.q, found.s, found.k, found.m) >= 0
        assert 0.3 < (found.q + found.k) * 32 / found.compute_s(32) <= 1.0001
        assert found.error > 0.02


def test_a_device_that_takes_the_same_for_any_batch_has_a_slope_all_the_same() -> None:
    device = Device((0.0, S, 0.0, M))
    device.run(32, 8)
    device.run(64, 8)
    found = device.estimate()
    assert found.q + found.k > 0
    assert found.compute_s(64) == pytest.approx(S + M, rel=0.01)


def test_steps_not_measured_in_parts_are_one_line() -> None:
    model = StepModel()
    for step in range(20):
        batch = 32 if step < 10 else 64
        model.observe(step, batch, (Q + K) * batch + S + M, 0.0)
    found = model.estimate()
    assert found is not None
    assert (found.k, found.m) == (0, 0)
    assert (found.q, found.s) == (pytest.approx(Q + K, rel=0.01), pytest.approx(S + M, rel=0.01))


def test_a_script_that_stops_measuring_parts_begins_a_new_model() -> None:
    device = Device()
    device.run(32, 10)
    device.run(64, 10)
    device.model.observe(100, 64, 0.4, 0.0)
    assert device.model.estimate() is None


@pytest.mark.parametrize("speed", [0.3, 0.5, 0.85, 1.3, 3.0])
def test_a_second_load_is_followed_within_ten_steps_at_batches_not_seen_since(speed: float) -> None:
    for seed in range(20):
        device = Device(noise=0.03, seed=seed)
        device.run(64, 30)
        device.run(48, 30)
        device.speed = speed
        device.run(48, 10)
        assert device.changes
        assert device.off(48) < 0.07
        assert device.off(64) < 0.07
        device.run(48, 30)
        assert device.off(64) < 0.05


def test_a_load_that_comes_and_goes_leaves_the_model_as_it_was() -> None:
    device = Device(noise=0.02)
    device.run(32, 30)
    device.run(64, 30)
    for speed in (0.5, 1.0, 0.4, 1.0):
        device.speed = speed
        device.run(64, 20)
    assert len(device.changes) == 4
    assert device.off(32) < 0.07
    assert device.off(64) < 0.05


def test_a_load_that_begins_with_a_new_batch_is_told_from_a_longer_step() -> None:
    """1. Two batches make a model. 2. A plan gives a third, and in the same step the device halves its speed."""
    device = Device(noise=0.02)
    device.run(32, 20)
    device.run(64, 20)
    device.speed = 0.5
    device.run(48, 10)
    assert device.changes
    assert device.off(32) < 0.07
    assert device.off(64) < 0.07


def test_a_device_that_is_no_straight_line_is_not_taken_for_one_that_became_slower() -> None:
    device = Device(noise=0.01)
    device.run(32, 20)
    device.run(64, 20)
    device.run(96, 20, outlier=lambda _: 1.1)
    assert device.changes == []
    assert device.off(32) < 0.07
    assert device.estimate().compute_s(96) == pytest.approx(1.1 * device.takes(96), rel=0.06)


def test_three_pauses_in_a_row_move_nothing() -> None:
    device = Device(noise=0.02)
    device.run(32, 20)
    device.run(64, 20)
    device.run(64, 3, outlier=lambda _: 30.0)
    device.run(64, 3)
    assert device.changes == []
    assert device.off(64) < 0.04


def test_a_slow_drift_is_followed_where_it_is_seen_and_widens_the_error_where_not() -> None:
    device = Device(noise=0.01)
    device.run(32, 16)
    device.run(64, 16)
    sure = device.estimate().error
    for i in range(200):
        device.speed = 1 / (1 + 0.0002 * i)
        device.run(64, 1)
    assert device.off(64) < 0.02
    assert device.estimate().error > 1.3 * sure


def test_only_so_much_is_remembered() -> None:
    device = Device()
    for batch in range(1, 200):
        device.run(batch, 20)
    points = device.model.points()
    assert [point.local_batch for point in points] == list(range(200 - KEPT_BATCHES, 200))
    assert all(len(each.steps) <= WINDOW_STEPS for each in device.model._batches.values())


def test_points_are_what_each_batch_takes_now() -> None:
    device = Device(noise=0.02)
    device.run(32, 20)
    device.run(64, 20)
    device.speed = 0.5
    device.run(64, 16)
    small, large = device.model.points()
    assert (small.local_batch, large.local_batch) == (32, 64)
    assert small.compute_s == pytest.approx(device.takes(32), rel=0.05)
    assert large.compute_s == pytest.approx(device.takes(64), rel=0.05)
    assert small.error > large.error
