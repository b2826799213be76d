from __future__ import annotations

import pytest

from atoll.step_estimators.memory_model import MAX_SAMPLES, MemoryModel

BASE, SLOPE = 1000, 10


def peak(batch: int) -> int:
    return BASE + SLOPE * batch


def test_two_batches_give_the_line_and_a_tenth_stays_free() -> None:
    model = MemoryModel(200, falls=True)
    assert model.max_batch(5000) == 0
    model.observe(64, peak(64))
    model.observe(128, peak(128))
    assert model.max_batch(5000) == (4500 - BASE) // SLOPE


def test_one_batch_alone_is_never_too_bold() -> None:
    """All that grew since before the first pass counts as the samples' own."""
    model = MemoryModel(200, falls=True)
    model.observe(128, peak(128))
    assert 128 < model.max_batch(5000) == int(128 + (4500 - peak(128)) / ((peak(128) - 200) / 128)) < 350


def test_a_nearer_batch_than_a_tenth_gives_no_slope() -> None:
    model = MemoryModel(0, falls=True)
    model.observe(128, peak(128))
    alone = model.max_batch(5000)
    model.observe(120, peak(128))  # noise as large as the difference
    assert model.max_batch(5000) == alone


@pytest.mark.parametrize(("falls", "bound"), [(True, 350), (False, 274)])
def test_a_process_that_keeps_what_it_freed_tells_nothing_by_smaller_batches(falls: bool, bound: int) -> None:
    model = MemoryModel(0, falls=falls)
    model.observe(200, peak(200))
    model.observe(100, peak(100) if falls else peak(200))
    assert model.max_batch(5000) == pytest.approx(bound, abs=30)
    model.observe(100, peak(200) if not falls else peak(100))
    model.observe(300, peak(300))
    assert model.max_batch(5000) <= 350


def test_the_newest_memory_counts_and_full_devices_hold_at_least_one() -> None:
    model = MemoryModel(0, falls=True)
    model.observe(64, peak(64))
    model.observe(128, peak(128))
    assert model.max_batch(2000) == (1800 - BASE) // SLOPE
    assert model.max_batch(100) == 1


def test_samples_that_need_no_memory_are_not_bounded() -> None:
    model = MemoryModel(1000, falls=False)
    model.observe(64, 1000)
    assert model.max_batch(2000) == MAX_SAMPLES
