"""squared_norm against float64 arithmetic in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.errors import BadInput
from atoll.kernels import _native, squared_norm

SIZES = [0, 1, 31, 32, 33, 1023, 1025, 2**18, 2**18 + 1, 2**20 + 1]


def normal(entries: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(entries, generator=torch.Generator().manual_seed(seed))


def reference(x: torch.Tensor) -> float:
    return math.fsum(np.square(x.cpu().numpy().astype(np.float64).ravel()))


@pytest.mark.parametrize("entries", SIZES)
def test_it_is_the_float64_sum_of_squares(entries: int) -> None:
    x = normal(entries)
    assert squared_norm(x) == pytest.approx(reference(x), rel=1e-13, abs=0)


@pytest.mark.parametrize(
    ("entries", "offset"), [*((33, n) for n in (1, 2, 3, 5, 7)), (1025, 1), (1025, 7), (2**18 + 9, 3)]
)
def test_misaligned_slices_are_read_where_they_begin_and_end(offset: int, entries: int) -> None:
    whole = normal(entries + 16)
    whole[:offset] = torch.inf
    whole[offset + entries :] = torch.inf
    x = whole[offset : offset + entries]
    assert squared_norm(x) == pytest.approx(reference(x), rel=1e-13)


@pytest.mark.parametrize("at", [0, 2**18 - 1, 2**18, 2**18 + 32])
def test_one_nan_anywhere_makes_the_result_nan(at: int) -> None:
    x = torch.zeros(2**18 + 33)
    x[at] = torch.nan
    assert math.isnan(squared_norm(x))


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_gives_infinity(sign: int) -> None:
    x = torch.ones(1000)
    x[500] = sign * torch.inf
    assert squared_norm(x) == math.inf


def test_minus_zero_counts_as_zero() -> None:
    result = squared_norm(torch.full((100,), -0.0))
    assert (result, math.copysign(1, result)) == (0.0, 1.0)


def test_the_smallest_and_largest_float32_neither_vanish_nor_overflow() -> None:
    assert squared_norm(torch.full((2,), 1e-45)) == 2 * float(np.float32(1e-45)) ** 2
    assert squared_norm(torch.full((2,), 3e38)) == 2 * float(np.float32(3e38)) ** 2


def test_any_shape_is_read_as_one_row() -> None:
    x = normal(3 * 4 * 5)
    assert squared_norm(x.reshape(3, 4, 5)) == squared_norm(x)
    assert squared_norm(x[7]) == squared_norm(x[7:8])


@pytest.mark.parametrize("entries", SIZES)
def test_the_bits_do_not_depend_on_the_number_of_threads_or_the_processor(entries: int) -> None:
    x = normal(entries, seed=entries)
    results = {squared_norm(x, threads) for threads in (0, 1, 2, 3, 7, 64)}
    results |= {_native.squared_norm(x, threads, portable=True) for threads in (1, 3)}
    assert len(results) == 1


@given(x=arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
@settings(max_examples=60, deadline=None)
def test_any_finite_buffer_agrees_with_numpy(x: np.ndarray) -> None:
    expected = math.fsum(np.square(x.astype(np.float64)))
    assert squared_norm(x) == pytest.approx(expected, rel=1e-13, abs=0)
    assert squared_norm(x) == _native.squared_norm(x, portable=True)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(3, dtype=torch.float64), "x is float64, not float32"),
        (torch.zeros(3, dtype=torch.bfloat16), "x is bfloat16, not float32"),
        (np.zeros(3, dtype=np.int32), "x is int32, not float32"),
        (np.zeros(3, dtype=np.complex64), "x is complex64, not float32"),
        (torch.zeros(4, 4).t(), "x is not contiguous; pass a contiguous copy"),
        (torch.zeros(10)[::2], "x is not contiguous"),
        (torch.zeros(1).expand(5), "x is not contiguous"),
        (np.zeros(10, np.float32)[::-1], "x is not contiguous"),
        (torch.zeros(4).to_sparse(), "x is a Tensor that shares no memory"),
        (torch.zeros(4, device="meta"), "x is a"),
        ([1.0, 2.0], "x is a list that shares no memory"),
        (None, "x is a NoneType that shares no memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_read_is_refused_by_name(x: object, says: str) -> None:
    with pytest.raises(BadInput, match=says) as refused:
        squared_norm(x)
    assert str(refused.value).startswith("squared_norm: ")


@pytest.mark.parametrize("threads", [-1, 257])
def test_a_senseless_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(BadInput, match=r"threads = -?\d+ is not in 0\.\.256"):
        squared_norm(torch.zeros(3), threads)


def test_a_read_only_array_can_be_read() -> None:
    assert squared_norm(np.frombuffer(np.array([3, 4], np.float32).tobytes(), np.float32)) == 25.0


def test_a_parameter_is_read_without_touching_its_graph() -> None:
    parameter = torch.nn.Parameter(torch.full((4,), 2.0))
    assert squared_norm(parameter) == 16.0
    assert parameter.grad_fn is None
