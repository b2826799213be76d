"""The threshold's control loop on distributions that hold still, shrink, jump and vanish."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from threshold_twin import ThresholdController

from atoll.errors import BadInput
from atoll.kernels import compress

BLOCKS, TARGET = 20_000, 200
Scores = NDArray[np.float64]


@functools.cache
def draw(step: int, kind: str) -> Scores:
    generator = np.random.default_rng(step)
    if kind == "normal":
        return np.asarray(np.abs(generator.standard_normal((BLOCKS, 16))).sum(1))
    return generator.lognormal(0.0, 1.5, BLOCKS)  # a heavy tail, as of embeddings


def run(controller: ThresholdController, steps: range, scale: float, kind: str, *, sampling: bool = False) -> list[int]:
    founds = []
    for step in steps:
        scores = scale * draw(step, kind)
        if sampling and controller.needs_sample:
            controller.start(list(scores[:: BLOCKS // 2000]), BLOCKS)
        founds.append(int((scores > controller.threshold).sum()))
        controller.update(founds[-1])
    return founds


def started(kind: str) -> ThresholdController:
    controller = ThresholdController(TARGET)
    controller.start(list(draw(0, kind)[:2000]), BLOCKS)
    return controller


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_the_first_step_is_near_and_the_loop_stays_there(kind: str) -> None:
    founds = run(started(kind), range(1, 60), 1.0, kind)
    assert TARGET / 2 < founds[0] < TARGET * 2
    assert np.mean(founds[20:]) == pytest.approx(TARGET, rel=0.1)
    assert all(TARGET / 2 < found < TARGET * 2 for found in founds[20:])


@pytest.mark.parametrize("factor", [10.0, 0.1, 1000.0, 0.001])
@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_gradients_of_another_scale_are_followed_without_a_new_sample(kind: str, factor: float) -> None:
    controller = started(kind)
    run(controller, range(1, 10), 1.0, kind)
    founds = run(controller, range(10, 110), factor, kind)
    assert np.mean(founds[-30:]) == pytest.approx(TARGET, rel=0.15)


def test_a_new_sample_finds_another_scale_at_once() -> None:
    controller = started("normal")
    founds = run(controller, range(1, 20), 1e-4, "normal", sampling=True)
    assert founds[:2] == [0, 0]
    assert TARGET / 2 < founds[2] < TARGET * 2
    assert not controller.needs_sample


def test_a_slow_drift_is_followed() -> None:
    controller = started("normal")
    founds = [run(controller, range(step, step + 1), 0.98**step, "normal")[0] for step in range(1, 150)]
    assert np.mean(founds[30:]) == pytest.approx(TARGET, rel=0.3)


def test_a_new_target_is_reached() -> None:
    controller = started("normal")
    controller.target = 20
    founds = run(controller, range(1, 80), 1.0, "normal")
    assert np.mean(founds[40:]) == pytest.approx(20, rel=0.2)


def test_gradients_of_zeros_give_a_threshold_of_0_which_is_left_when_they_end() -> None:
    controller = ThresholdController(TARGET)
    assert controller.needs_sample
    assert controller.start([0.0] * 100, BLOCKS) == 0.0
    assert [controller.update(0) for _ in range(3)] == [0.0] * 3
    assert not controller.needs_sample
    founds = run(controller, range(10), 1.0, "normal", sampling=True)
    assert founds[0] == BLOCKS
    assert TARGET / 2 < founds[-1] < TARGET * 2


def test_scores_that_are_not_finite_do_not_count() -> None:
    controller = ThresholdController(10)
    assert controller.start([-1.0, np.nan, np.inf, 4.0, 3.0, 2.0, 1.0, 0.5, 0.25, 0.125], 100) == 4.0


def test_the_same_counts_give_the_same_thresholds() -> None:
    counts = [int(x) for x in np.random.default_rng(0).integers(0, 1000, 200)]
    a, b = started("normal"), started("normal")
    assert [a.update(n) for n in counts] == [b.update(n) for n in counts]


def test_within_a_tenth_of_the_target_nothing_moves() -> None:
    controller = started("normal")
    before = controller.threshold
    for found in (180, 200, 220):
        assert controller.update(found) == before
    assert controller.update(221) > before


def test_a_target_that_sends_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="target = 0 blocks a round sends nothing; pass 1 or more"):
        ThresholdController(0)
    with pytest.raises(BadInput, match="target = -1"):
        ThresholdController(5).target = -1


def test_it_drives_the_kernel_to_its_target() -> None:
    """Error feedback makes residuals grow where nothing is sent: the threshold follows."""
    generator = torch.Generator().manual_seed(0)
    residual, target = torch.zeros(64_000), 40
    controller = ThresholdController(target)
    index, values, sample = torch.zeros(80, dtype=torch.int32), torch.zeros(80, 16), np.zeros(1000, np.float32)
    founds = []
    for step in range(120):
        gradient = torch.randn(64_000, generator=generator)
        if controller.needs_sample:
            compress.sample_scores(gradient, residual, step, sample)
            controller.start(sample.tolist(), 4000)
        selection = compress.threshold_block(gradient, residual, controller.threshold, index, values)
        controller.update(selection.found)
        founds.append(selection.found)
    assert np.mean(founds[60:]) == pytest.approx(target, rel=0.25)
