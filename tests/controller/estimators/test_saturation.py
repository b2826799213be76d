from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from atoll.controller.estimators.saturation import SaturationEstimate, curve_of, fit_saturation
from atoll.step_estimators.estimates import BatchPoint, NodeEstimate, RankProfile


def points(alpha: float, beta: float, batches: list[int], noise: float = 0.0, seed: int = 1) -> list[BatchPoint]:
    rng = random.Random(seed)
    return [
        BatchPoint(b, b / min(beta / alpha * b, beta) * rng.lognormvariate(0, noise), max(noise, 0.01)) for b in batches
    ]


@pytest.mark.parametrize(("alpha", "beta"), [(20, 99), (32, 148), (28, 300)])
def test_devices_of_the_paper_are_found_again(alpha: float, beta: float) -> None:
    """An RTX 2080 Ti, 3090 and 4090 with a vision transformer."""
    found = fit_saturation(points(alpha, beta, [4, 8, 16, 64, 128]))
    assert found is not None
    assert (found.alpha, found.beta) == (pytest.approx(alpha), pytest.approx(beta))


MEASURED = st.tuples(st.integers(1, 300), st.floats(0.001, 1), st.floats(0.005, 0.2))


@settings(max_examples=20)
@given(st.lists(MEASURED, min_size=2, max_size=8, unique_by=lambda point: point[0]))
def test_nelder_mead_from_any_start_ends_no_lower(measured: list[tuple[int, float, float]]) -> None:
    given_points = [BatchPoint(*each) for each in measured]
    found = fit_saturation(given_points)
    assert found is not None
    x = np.array([p.local_batch for p in given_points], dtype=float)
    f = x / np.array([p.compute_s for p in given_points])
    weights = 1 / (np.array([p.error for p in given_points]) * f) ** 2

    def loss(at: np.ndarray) -> float:
        alpha = float(np.clip(at[0], x.min(), x.max()))
        return float((weights * (np.minimum(at[1] / alpha * x, at[1]) - f) ** 2).sum())

    ours = loss(np.array([found.alpha, found.beta]))
    for start in (x.min(), float(np.median(x)), x.max()):
        other = minimize(loss, [start, f.max()], method="Nelder-Mead", options={"maxfev": 300})
        assert ours <= other.fun + 1e-9 * max(1.0, other.fun)


def test_noise_of_five_percent_moves_the_fit_by_as_much() -> None:
    off = []
    for seed in range(50):
        found = fit_saturation(points(28, 300, [8, 12, 16, 32, 64, 96], noise=0.05, seed=seed))
        assert found is not None
        off += [b / found.compute_s(b) / min(300 / 28 * b, 300) - 1 for b in (10, 24, 128)]
    assert np.std(off) < 0.06
    assert abs(float(np.mean(off))) < 0.02


def test_a_device_that_never_saturated_is_not_believed_to_get_faster() -> None:
    found = fit_saturation(points(1000, 500, [16, 32]))
    assert found is not None
    assert found.alpha == 32
    assert found.compute_s(64) == pytest.approx(64 / 16)


def test_a_device_that_always_was_saturated_may_be_so_from_the_smallest_batch_on() -> None:
    found = fit_saturation(points(2, 50, [16, 32]))
    assert found is not None
    assert found.alpha <= 16
    assert (found.compute_s(16), found.compute_s(32)) == pytest.approx((16 / 50, 32 / 50))


def test_the_error_grows_with_that_of_the_points_and_with_what_does_not_fit() -> None:
    sure = fit_saturation(points(20, 99, [8, 16, 32, 64]))
    unsure = fit_saturation([p._replace(error=0.1) for p in points(20, 99, [8, 16, 32, 64])])
    crooked = [
        BatchPoint(8, 0.1, 0.01),
        BatchPoint(16, 0.1, 0.01),
        BatchPoint(32, 0.6, 0.01),
        BatchPoint(64, 0.4, 0.01),
    ]
    wrong = fit_saturation(crooked)
    assert sure is not None
    assert unsure is not None
    assert wrong is not None
    assert unsure.error == pytest.approx(10 * sure.error)
    assert wrong.error > 10 * sure.error


def profile_of(measured: list[BatchPoint], line: NodeEstimate | None) -> RankProfile:
    newest = measured[-1]
    return RankProfile(
        plan=3,
        local_batch=newest.local_batch,
        compute_s=newest.compute_s,
        compute_error_s=0.0,
        steps=20,
        estimate=line,
        points=tuple(measured),
    )


def line(per_sample_s: float, fixed_s: float) -> NodeEstimate:
    return NodeEstimate(q=per_sample_s, s=fixed_s, k=0.0, m=0.0, error=0.02, low_batch=8, high_batch=64)


def test_a_device_that_a_knee_explains_and_no_line_does_is_taken_to_saturate() -> None:
    knee = points(32, 400, [8, 16, 64, 128])
    found = curve_of(profile_of(knee, line(0.002, 0.045)))
    assert isinstance(found, SaturationEstimate)
    assert (found.alpha, found.beta) == pytest.approx((32, 400))
    assert [found.compute_s(b) for b in (4, 32, 64)] == pytest.approx([0.08, 0.08, 0.16])


def test_a_device_stays_on_its_line_where_that_fits_or_too_little_was_seen() -> None:
    straight = [BatchPoint(b, 0.01 + 0.001 * b, 0.02) for b in (8, 16, 64)]
    fits = line(0.001, 0.01)
    assert curve_of(profile_of(straight, fits)) is fits
    knee = points(32, 400, [8, 64])
    assert curve_of(profile_of(knee, line(0.0014, 0.068))) == line(0.0014, 0.068)
    assert curve_of(profile_of(points(32, 400, [8, 16, 64]), None)) is None


def test_one_batch_or_none_with_samples_is_too_little() -> None:
    assert fit_saturation([]) is None
    assert fit_saturation([BatchPoint(16, 0.1, 0.01)]) is None
    assert fit_saturation([BatchPoint(16, 0.1, 0.01), BatchPoint(0, 0.05, 0.01)]) is None
