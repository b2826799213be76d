"""What is tried next, and whether the surrogate finds a known g(r, X) again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atoll.profiling import surrogate
from atoll.profiling.surrogate import Tried

BATCHES = surrogate.candidate_batches(32, 512)


def known_ratio(sparsity: float, batch: float) -> float:
    """Like what is measured: little up to 0.9, steeper from there, less harm to large batches."""
    return 1 + 0.08 * (-math.log10(1 - sparsity)) ** 1.5 * (128 / batch) ** 0.3


def probed(count: int, noise: float) -> list[Tried]:
    generator = np.random.default_rng(5)
    tried: list[Tried] = []
    for number in range(count):
        sparsity = surrogate.draw_sparsity(number, "log-uniform", seed=1)
        batch = BATCHES[3 * number % len(BATCHES)]
        tried.append(
            Tried(sparsity, batch, known_ratio(sparsity, batch) * math.exp(noise * generator.standard_normal()))
        )
    return tried


def test_candidates_begin_and_end_where_asked_and_are_few() -> None:
    assert (BATCHES[0], BATCHES[-1], len(BATCHES)) == (32, 512, 7)
    assert surrogate.candidate_batches(8, 8) == (8,)
    assert surrogate.candidate_batches(2, 4) == (2, 3, 4)
    assert surrogate.reference_batch(BATCHES) == 128
    assert surrogate.first_baselines(BATCHES) == (128, 32, 512)
    assert surrogate.first_baselines((8,)) == (8,)


def test_sparsities_leave_no_gap_in_what_is_kept() -> None:
    kept = sorted(-math.log10(1 - surrogate.draw_sparsity(number, "log-uniform", seed=3)) for number in range(30))
    gaps = np.diff([0.0, *kept, 4.0])
    assert 0 <= kept[0] <= kept[-1] <= 4.0001
    assert gaps.max() < 3 * 4 / 30


def test_published_sparsities_are_uniform_from_0_to_0_999() -> None:
    sparsities = sorted(surrogate.draw_sparsity(number, "uniform", seed=3) for number in range(30))
    assert 0 <= sparsities[0] <= sparsities[-1] <= 0.999
    assert np.diff([0.0, *sparsities, 0.999]).max() < 3 / 30
    assert sum(sparsity > 0.9 for sparsity in sparsities) <= 4


def test_the_surrogate_finds_a_known_function_again_and_knows_how_surely() -> None:
    fitted = surrogate.fit(probed(24, noise=0.01), dict.fromkeys(BATCHES, 1.0), BATCHES, sampling="log-uniform", seed=1)
    grid = fitted.surrogate
    true = np.array([[known_ratio(sparsity, batch) for batch in grid.batches] for sparsity in grid.sparsities])
    off = np.log1p(grid.extra) - np.log(true)
    assert grid.sparsities[0] == 0
    assert grid.sparsities[-1] == 0.9999
    assert np.sqrt(np.mean(off**2)) < 0.03
    assert np.mean(np.abs(off) < 3 * np.array(fitted.error) + 0.005) > 0.9
    assert fitted.surrogate == fitted.compression


def test_what_the_batch_alone_costs_comes_from_the_baselines_also_between_them() -> None:
    tried = [Tried(sparsity, batch, 1.0) for sparsity in (0.0, 0.9, 0.999) for batch in (32, 128, 512)]
    fitted = surrogate.fit(tried, {32: 0.5, 128: 1.0, 512: 2.0}, BATCHES, sampling="log-uniform", seed=1)
    compression = np.array(fitted.compression.extra)
    assert compression == pytest.approx(np.zeros_like(compression), abs=1e-3)
    by_batch = dict(zip(fitted.surrogate.batches, 1 + np.array(fitted.surrogate.extra[3]), strict=True))
    assert by_batch[32] == pytest.approx(0.5, rel=1e-2)
    assert by_batch[512] == pytest.approx(2.0, rel=1e-2)
    assert by_batch[BATCHES[4]] == pytest.approx(math.sqrt(BATCHES[4] / 128), rel=1e-2)


def test_probes_that_diverged_count_as_the_worst_and_break_nothing() -> None:
    tried = [*probed(8, noise=0.0), Tried(0.9999, 32, math.nan), Tried(0.9998, 32, math.inf)]
    fitted = surrogate.fit(tried, dict.fromkeys(BATCHES, 1.0), BATCHES, sampling="log-uniform", seed=1)
    assert np.isfinite(fitted.surrogate.extra).all()
    assert fitted.surrogate.extra[-1][0] > 2
    assert fitted.surrogate.extra[3][3] < 1


def test_the_same_probes_lead_to_the_same_next_one() -> None:
    tried = probed(6, noise=0.02)
    assert len({surrogate.choose_batch(0.99, tried, BATCHES, seed=1) for _ in range(2)}) == 1


def test_the_batch_is_chosen_where_the_loss_may_be_least_for_that_sparsity() -> None:
    """Every batch was tried at many sparsities without noise, and 512 is best everywhere."""
    tried = [
        Tried(sparsity, batch, known_ratio(sparsity, batch))
        for sparsity in (0.5, 0.9, 0.99, 0.999)
        for batch in BATCHES
    ]
    assert surrogate.choose_batch(0.995, tried, BATCHES, seed=1) == 512
