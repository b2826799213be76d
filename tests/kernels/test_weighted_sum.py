"""weighted_sum against the same expression in NumPy's float32: equal bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from atoll.errors import BadInput
from atoll.kernels import _native, weighted_sum

SIZES = [0, 1, 31, 32, 33]
F32 = NDArray[np.float32]


def normal(entries: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(entries)
    return [torch.randn(entries, generator=generator) for _ in range(count)]


def reference(inputs: Sequence[F32], weights: Sequence[float], entries: int) -> F32:
    """The contract: terms from the first to the last, each product and each sum rounded to float32."""
    terms = [np.float32(weight) * x for x, weight in zip(inputs, weights, strict=True)]
    total = terms[0].copy() if terms else np.zeros(entries, np.float32)
    for term in terms[1:]:
        total = total + term
    return total


def same_bits(out: torch.Tensor, expected: F32) -> bool:
    ours = out.cpu().numpy()
    nan = np.isnan(ours)
    return bool((nan == np.isnan(expected)).all() and (ours.view(np.uint32) == expected.view(np.uint32))[~nan].all())


def as_numpy(tensors: Sequence[torch.Tensor]) -> list[F32]:
    return [tensor.cpu().numpy() for tensor in tensors]


@pytest.mark.parametrize(
    ("entries", "count"), [*itertools.product(SIZES, (0, 1, 2, 3, 5)), (1023, 3), (1025, 5), (2**20 + 1, 2)]
)
def test_every_bit_is_that_of_numpy(entries: int, count: int) -> None:
    inputs = normal(entries, count)
    weights = [0.3, -1.7, 1 / 3, 1e-3, 2.0][:count]
    out = torch.full((entries,), torch.nan)
    weighted_sum(out, inputs, weights)
    assert same_bits(out, reference(as_numpy(inputs), weights, entries))


@pytest.mark.parametrize(
    ("entries", "count", "place"), [(33, 1, 0), (33, 2, 0), (33, 2, 1), (33, 4, 0), (33, 4, 3), (2**18 + 1025, 4, 2)]
)
def test_out_may_be_any_one_of_the_inputs(entries: int, count: int, place: int) -> None:
    inputs = normal(entries, count)
    weights = [0.5, 0.25, -3.0, 0.1][:count]
    expected = reference(as_numpy([x.clone() for x in inputs]), weights, entries)
    out = inputs[place]
    weighted_sum(out, inputs, weights)
    assert same_bits(out, expected)


def test_out_may_be_several_of_the_inputs() -> None:
    x = torch.ones(5000)
    weighted_sum(x, [x, x, x], [1.0, 2.0, 4.0])
    assert x.eq(7.0).all()


@pytest.mark.parametrize(
    ("entries", "offsets"),
    [(9, (1, 0, 0)), (9, (0, 3, 5)), (1025, (7, 7, 1)), (1025, (1, 0, 0)), (2**18 + 3, (0, 3, 5))],
)
def test_misaligned_slices_write_nothing_outside(entries: int, offsets: tuple[int, int, int]) -> None:
    whole, *others = normal(entries + 8, 3)
    out, a, b = (x[o : o + entries] for x, o in zip([whole, *others], offsets, strict=True))
    before = whole.clone()
    weighted_sum(out, [a, b], [2.0, -0.5])
    assert same_bits(out, reference(as_numpy([a, b]), [2.0, -0.5], entries))
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside[offsets[0] : offsets[0] + entries] = False
    assert torch.equal(whole[outside], before[outside])


def test_nan_and_infinity_propagate_even_under_weight_0() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    out = torch.zeros(4)
    weighted_sum(out, [x, torch.ones(4)], [0.0, 5.0])
    assert out.cpu().isnan().tolist() == [True, True, True, False]
    weighted_sum(out, [x], [2.0])
    assert out.cpu().tolist()[1:] == [np.inf, -np.inf, 2.0]


@pytest.mark.parametrize("weight", [np.nan, np.inf, 1e300])
def test_a_weight_beyond_float32_becomes_what_ieee_says(weight: float) -> None:
    out = torch.ones(40)
    weighted_sum(out, [out], [weight])
    assert out.isnan().all() if np.isnan(weight) else out.eq(np.inf).all()


def test_minus_zero_keeps_its_sign() -> None:
    out = torch.ones(35)
    weighted_sum(out, [torch.full((35,), -0.0)], [1.0])
    assert out.signbit().all()


def test_buffers_of_other_shapes_are_read_as_rows() -> None:
    """A gradient [3, 4] goes into its place in a flat bucket."""
    bucket = torch.zeros(20)
    gradient = torch.arange(12.0).reshape(3, 4)
    weighted_sum(bucket[5:17], [gradient], [0.5])
    assert bucket.tolist() == [0.0] * 5 + [0.5 * i for i in range(12)] + [0.0] * 3


@pytest.mark.parametrize("entries", [1025, 2**18 + 1])
def test_the_bits_do_not_depend_on_the_number_of_threads_or_the_processor(entries: int) -> None:
    inputs, weights = normal(entries, 4), [0.1, 0.7, -0.3, 1e-4]
    expected = torch.empty(entries)
    weighted_sum(expected, inputs, weights, threads=1)
    for threads, portable in [(0, False), (2, False), (3, False), (64, False), (1, True), (3, True)]:
        out = torch.full((entries,), torch.nan)
        _native.weighted_sum(out, inputs, weights, threads, portable=portable)
        assert torch.equal(out, expected), (threads, portable)


def test_as_many_inputs_as_allowed() -> None:
    inputs = normal(100, 128)
    out = torch.empty(100)
    weighted_sum(out, inputs, [0.01] * 128)
    assert same_bits(out, reference(as_numpy(inputs), [0.01] * 128, 100))


any_float = st.floats(width=32)


@given(
    inputs=st.integers(0, 200).flatmap(
        lambda n: st.lists(arrays(np.float32, n, elements=any_float), min_size=1, max_size=4)
    ),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_buffers_at_all_agree_with_numpy(inputs: list[F32], data: st.DataObject) -> None:
    weights = data.draw(st.lists(any_float, min_size=len(inputs), max_size=len(inputs)))
    with np.errstate(all="ignore"):
        expected = reference(inputs, weights, inputs[0].size)
    out = data.draw(st.sampled_from([*inputs, np.empty_like(inputs[0])]))
    weighted_sum(out, inputs, weights)
    assert same_bits(torch.from_numpy(out), expected)


shared = torch.zeros(100)


@pytest.mark.parametrize(
    ("out", "inputs", "weights", "says"),
    [
        (torch.zeros(3), [torch.zeros(3)], [], "1 inputs but 0 weights; pass one weight for each input"),
        (torch.zeros(3), [torch.zeros(4)], [1.0], r"inputs\[0\] has 4 entries but out has 3"),
        (torch.zeros(3), [torch.zeros(3), torch.zeros(3).half()], [1, 1], r"inputs\[1\] is float16, not float32"),
        (torch.zeros(3), [torch.zeros(6)[::2]], [1.0], r"inputs\[0\] is not contiguous"),
        (torch.zeros(6)[::2], [torch.zeros(3)], [1.0], "out is not contiguous"),
        (torch.zeros(3).double(), [torch.zeros(3)], [1.0], "out is float64, not float32"),
        (shared[:50], [shared[1:51]], [1.0], r"inputs\[0\] overlaps out by a part; pass out itself"),
        (shared[49:99], [shared[:50]], [1.0], r"inputs\[0\] overlaps out by a part"),
        (np.frombuffer(bytes(12), np.float32), [torch.zeros(3)], [1.0], "out is read-only"),
        ([0.0], [torch.zeros(1)], [1.0], "out is a list that shares no memory"),
        (torch.zeros(1), [None], [1.0], r"inputs\[0\] is a NoneType that shares no memory"),
        (torch.zeros(1), [torch.zeros(1)], ["a"], r"weights\[0\] is a str; pass a float"),
        (torch.zeros(1), [torch.zeros(1)] * 129, [1.0] * 129, "inputs has 129 buffers; at most 128"),
        (torch.zeros(1), 5, [1.0], "inputs and weights must be sequences"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    out: torch.Tensor, inputs: Sequence[object], weights: Sequence[float], says: str
) -> None:
    before = [float(value) for value in out]
    with pytest.raises(BadInput, match=says) as refused:
        weighted_sum(out, inputs, weights)
    assert str(refused.value).startswith("weighted_sum: ")
    assert [float(value) for value in out] == before


def test_neighbours_that_only_touch_are_no_overlap() -> None:
    whole = torch.ones(100)
    weighted_sum(whole[:50], [whole[50:]], [3.0])
    assert whole.tolist() == [3.0] * 50 + [1.0] * 50
