"""Selection from the difference between shared parameters and live weights, against numpy in float64."""

from __future__ import annotations

from typing import Any

import native_parts
import numpy as np
import pytest
import torch
from exchange_job import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from atoll.kernels.compress import block_count

SIZES = [0, 1, 15, 16, 17, 63, 64, 65, 79, 1023, 1025, 2**18 + 1]
LIVE = [torch.float32, torch.float16, torch.bfloat16]
SCALE = 1 / 3
F64 = NDArray[np.float64]


def select(
    shared_param: Any, live: Any, threshold: float, capacity: int, **how: Any
) -> tuple[tuple[int, int, int], NDArray[np.uint32], NDArray[np.float32]]:
    index, values = np.full(capacity, 2**32 - 1, np.uint32), np.full((capacity, 16), np.nan, np.float32)
    counts = native_parts.load().difference_block(shared_param, live, SCALE, threshold, index, values, **how)
    assert (index[counts[0] :] == 2**32 - 1).all()
    assert np.isnan(values[counts[0] :]).all()
    return counts, index[: counts[0]], values[: counts[0]]


def plain(shared_param: torch.Tensor, live: torch.Tensor) -> F64:
    """The difference in float64, padded, by blocks."""
    d = np.float64(np.float32(SCALE)) * (shared_param.double().numpy() - live.double().numpy())
    return np.asarray(np.pad(d, (0, -len(d) % 16)).reshape(-1, 16))


def check(shared_param: torch.Tensor, live: torch.Tensor, threshold: float, capacity: int, **how: Any) -> None:
    """No test sets a threshold within rounding of a score."""
    d = plain(shared_param, live)
    scores = np.abs(d).sum(1)
    finite = scores <= float(np.finfo(np.float32).max)
    wanted = np.flatnonzero(finite & (scores > threshold))
    (chosen, found, nonfinite), index, values = select(shared_param, live, threshold, capacity, **how)
    assert (found, nonfinite) == (len(wanted), int((~finite).sum()))
    assert chosen == min(found, capacity)
    assert (index == wanted[:capacity]).all()
    np.testing.assert_allclose(values, d[index], rtol=3e-7, atol=1e-37)


@pytest.mark.parametrize("dtype", LIVE)
@pytest.mark.parametrize("entries", SIZES)
def test_the_blocks_above_the_threshold_are_those_of_float64(entries: int, dtype: torch.dtype) -> None:
    shared_param = normal(entries, 1)
    live = (shared_param + 0.1 * normal(entries, 2)).to(dtype)
    every = block_count(entries)
    for capacity, one, three in ((0, True, False), (5, False, True), (every, True, False), (every, False, True)):
        check(shared_param, live, 0.4321, capacity, portable=one, threads=1)
        check(shared_param, live, 0.4321, capacity, portable=three, threads=3)


@pytest.mark.parametrize("dtype", LIVE)
def test_processors_and_threads_give_the_same_bits_at_any_alignment(dtype: torch.dtype) -> None:
    memory, other = normal(600_000, 3), normal(600_000, 4).to(dtype)
    for shared_param_at, live_at in [(0, 0), (1, 3), (7, 2), (15, 15)]:
        shared_param, live = memory[shared_param_at : shared_param_at + 590_001], other[live_at : live_at + 590_001]
        _, index, values = select(shared_param, live, 6.5, 20_000, threads=1)
        assert len(index) > 1000
        for how in ({"portable": True, "threads": 1}, {"threads": 2}, {"portable": True, "threads": 3}):
            _, same_index, same_values = select(shared_param, live, 6.5, 20_000, **how)
            assert (index == same_index).all()
            assert (values.view(np.int32) == same_values.view(np.int32)).all()


@settings(max_examples=50, deadline=None)
@given(
    pairs=arrays(np.float32, st.tuples(st.just(2), st.integers(0, 150)), elements=st.floats(width=32)),
    portable=st.booleans(),
)
def test_blocks_that_are_not_finite_are_counted_and_never_chosen(pairs: NDArray[np.float32], portable: bool) -> None:
    """A block counts as not finite if its float32 score is; sums within rounding of the largest number are left out."""
    shared_param, live = torch.from_numpy(pairs[0].copy()), torch.from_numpy(pairs[1].copy())
    with np.errstate(all="ignore"):
        scores = np.abs(plain(shared_param, live)).sum(1)
        steps = np.abs(shared_param.double().numpy() - live.double().numpy())  # not scaled: may overflow by itself
    largest = float(np.finfo(np.float32).max)
    near = (scores > 0.999 * largest) & (scores < 1.001 * largest)
    if near.any() or (steps[np.isfinite(steps)] > 0.999 * largest).any():
        return
    if ((scores > 0) & (scores < 1e-30)).any():  # rounds to no score at all
        return
    (chosen, found, nonfinite), index, values = select(shared_param, live, 0.0, len(scores), portable=portable)
    finite = scores <= largest
    assert (chosen, found, nonfinite) == (len(index), len(index), int((~finite).sum()))
    assert (index == np.flatnonzero(finite & (scores > 0))).all()
    assert np.isfinite(values).all()


def test_a_mate_of_a_block_that_is_not_finite_is_still_chosen() -> None:
    """Scores are added up four blocks at a time."""
    for bad in range(8):
        shared_param, live = normal(128, 5), normal(128, 6)
        live[bad * 16 + 3] = torch.nan
        for portable in (False, True):
            counts, index, _ = select(shared_param, live, 0.0, 8, portable=portable)
            assert counts == (7, 7, 1)
            assert sorted({*index.tolist(), bad}) == list(range(8))


def test_half_of_every_kind_is_what_torch_takes_it_for() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        live = bits.view(dtype)
        wide = live.float()
        live = live[wide.isfinite() & (wide.abs() < 1e30)].repeat_interleave(16)
        for portable in (False, True):
            check(torch.full((len(live),), 0.25), live, 1e-3, block_count(len(live)), portable=portable)


def test_what_does_not_fit_is_refused() -> None:
    shared_param, live = torch.zeros(160), torch.zeros(160)
    index, values = np.zeros(4, np.uint32), np.zeros((4, 16), np.float32)
    with pytest.raises(ValueError, match="as long as shared_param"):
        native_parts.load().difference_block(shared_param, live[:159], 1.0, 0.0, index, values)
    with pytest.raises(ValueError, match="values of every index"):
        native_parts.load().difference_block(shared_param, live, 1.0, 0.0, index, values[:3])
    with pytest.raises(ValueError, match="threshold"):
        native_parts.load().difference_block(shared_param, live, 1.0, -1.0, index, values)
    with pytest.raises(ValueError, match="shared_param and values share memory"):
        native_parts.load().difference_block(shared_param, live, 1.0, 0.0, index, shared_param[:64])
    with pytest.raises(TypeError):
        native_parts.load().difference_block(shared_param, live.double(), 1.0, 0.0, index, values)
