"""Payloads there and back, damaged and made up; sums of several workers' updates, bit for bit."""

from __future__ import annotations

from typing import Any

import block_coo
import numpy as np
import pytest
import torch
from block_coo import Indices
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.errors import BadInput
from atoll.kernels.exchange_engine import Values

INDICES: list[Indices] = ["delta", "none"]
FORMATS: dict[Values, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 1023, 1025, 2**18 + 1]
U32 = NDArray[np.uint32]


def update(entries: int, seed: int = 0, share: float = 0.3) -> tuple[U32, torch.Tensor]:
    units = -(-entries // 16)
    index = np.zeros(int(units * share + 0.5), np.uint32)
    block_coo.random_blocks(seed, units, index)
    values = torch.randn(len(index), 16, generator=torch.Generator().manual_seed(seed))
    if len(index) and index[-1] == units - 1:
        values[-1, entries - (units - 1) * 16 :] = 0
    return index, values


def encoded(index: U32, values: torch.Tensor, entries: int, residual: Any = None, **layout: Any) -> NDArray[np.uint8]:
    bound = block_coo.payload_bound(len(index), **layout)
    out = np.zeros(bound, np.uint8)
    return out[: block_coo.encode(index, values, entries, out, residual=residual, **layout)]


def decoded(payload: Any, index: U32, entries: int, **layout: Any) -> tuple[U32, torch.Tensor]:
    back = index.copy() if layout.get("indices") == "none" else np.full_like(index, 7)
    values = torch.full((len(index), 16), torch.nan)
    block_coo.decode(payload, entries, back, values, **layout)
    return back, values


@pytest.mark.parametrize("entries", SIZES)
@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("value_format", list(FORMATS))
def test_there_and_back(entries: int, indices: Indices, value_format: Values) -> None:
    index, values = update(entries)
    layout = {"indices": indices, "value_format": value_format}
    payload = encoded(index, values, entries, **layout)
    back, arrived = decoded(payload.tobytes(), index, entries, **layout)
    assert back.tolist() == index.tolist()
    expected = values.to(FORMATS[value_format]).float()
    assert (arrived.view(torch.int32) == expected.view(torch.int32)).all()


def test_gaps_cost_one_byte_at_99_percent() -> None:
    entries = 16 * 100_000
    index, values = update(entries, share=0.01)
    assert len(encoded(index, values, entries)) < len(index) * 65.4
    assert len(encoded(index, values, entries, indices="none", value_format="float16")) == len(index) * 32


def test_indices_up_to_the_last_of_32_bits_travel() -> None:
    entries = 16 * 2**32
    index = np.array([0, 1, 127, 128, 129, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    values = torch.ones(8, 16)
    payload = encoded(index, values, entries)
    assert decoded(payload, index, entries)[0].tolist() == index.tolist()


@pytest.mark.parametrize("value_format", ["float16", "bfloat16"])
def test_what_rounding_takes_away_is_in_the_residual(value_format: Values) -> None:
    entries = 1025
    index, values = update(entries)
    values *= torch.logspace(-9, 6, len(index))[:, None]  # from float16's subnormals to beyond its range
    residual, before = torch.zeros(entries), torch.zeros(-(-entries // 16), 16)
    before[index.astype(np.int64)] = values
    payload = encoded(index, values, entries, residual, value_format=value_format)
    _, sent = decoded(payload, index, entries, value_format=value_format)
    assert sent.isfinite().all()
    together = torch.zeros_like(before)
    together[index.astype(np.int64)] = sent
    assert (together.flatten()[:entries] + residual == before.flatten()[:entries]).all()


def test_every_16_bit_number_is_rounded_as_torch_does() -> None:
    """Every float16 and bfloat16, and what lies halfway between two of them."""
    for value_format, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
        every = every[every.isfinite()].sort().values
        middle = (every[1:].double() + every[:-1].double()).div(2).float()
        x = torch.cat([every, middle, middle.nextafter(torch.tensor(torch.inf)), middle.nextafter(-every[-1])])
        x = x[: len(x) // 16 * 16].reshape(-1, 16)
        index = np.arange(len(x), dtype=np.uint32)
        payload = encoded(index, x, x.numel(), value_format=value_format)
        sent = decoded(payload, index, x.numel(), value_format=value_format)[1]
        assert (sent.view(torch.int32) == x.to(dtype).float().view(torch.int32)).all()


@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("value_format", [*FORMATS, "int8", "int4", "int2"])
def test_a_payload_of_any_other_length_is_refused(indices: Indices, value_format: Values) -> None:
    index, values = update(1025)
    layout = {"indices": indices, "value_format": value_format}
    payload = encoded(index, values, 1025, **layout).tobytes()
    for wrong in (payload[:-1], payload[:5], b"", payload + b"\0", payload * 2):
        with pytest.raises(BadInput, match=rf"decode: the payload of {len(wrong)} bytes .*; drop the message"):
            decoded(wrong, index, 1025, **layout)


@pytest.mark.parametrize(
    "raw", [b"\x00\x41", b"\x41\x00", b"\x80\x80\x80\x80\x80\x01", b"\xff\xff\xff\xff\xff", b"\xff"]
)
def test_gaps_that_no_encoder_writes_are_refused(raw: bytes) -> None:
    with pytest.raises(BadInput, match="cut short or lie outside|longer|too short"):
        decoded(raw + bytes(128), np.zeros(2, np.uint32), 1025, indices="delta")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_neither_leave_nor_arrive(bad: float) -> None:
    index, values = update(1025)
    payload = encoded(index, values, 1025, indices="none").copy()
    payload.view(np.float32)[17] = bad
    with pytest.raises(BadInput, match="values that are not finite"):
        decoded(payload, index, 1025, indices="none")
    values[1, 1] = bad
    with pytest.raises(BadInput, match="encode: values holds a NaN or an infinity"):
        encoded(index, values, 1025)


def test_padding_that_is_not_zeros_is_not_let_in() -> None:
    payload = encoded(np.array([0, 1], np.uint32), torch.ones(2, 16), 17)
    values = decoded(payload, np.zeros(2, np.uint32), 17)[1]
    assert values[0].eq(1).all()
    assert values[1].tolist() == [1.0] + [0.0] * 15


@given(
    payload=st.binary(max_size=300),
    count=st.integers(0, 12),
    entries=st.integers(0, 3000),
    value_format=st.sampled_from(list(FORMATS)),
)
@settings(max_examples=100, deadline=None)
def test_noise_is_refused_or_yields_a_valid_update(
    payload: bytes, count: int, entries: int, value_format: Values
) -> None:
    index = np.zeros(count, np.uint32)
    try:
        index, values = decoded(payload, index, entries, value_format=value_format)
    except BadInput:
        return
    assert (np.diff(index.astype(np.int64)) > 0).all()
    assert count == 0 or index[-1] < -(-entries // 16)
    assert values.isfinite().all()


@given(damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_damaged_payload_is_refused_or_yields_a_valid_update(damage: list[tuple[int, int]]) -> None:
    index, values = update(1025)
    payload = encoded(index, values, 1025).copy()
    for at, byte in damage:
        payload[at % len(payload)] = byte
    try:
        back, arrived = decoded(payload, index, 1025)
    except BadInput:
        return
    assert (np.diff(back.astype(np.int64)) > 0).all()
    assert back[-1] <= 64
    assert arrived.isfinite().all()


def reference_sum(updates: list[tuple[U32, torch.Tensor]]) -> tuple[list[int], torch.Tensor]:
    total: dict[int, torch.Tensor] = {}
    for index, values in updates:
        for unit, row in zip(index.tolist(), values, strict=True):
            total[unit] = total[unit] + row if unit in total else row
    order = sorted(total)
    return order, torch.stack([total[unit] for unit in order]) if order else torch.zeros(0, 16)


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("entries", [0, 1, 17, 1025, 2**16 + 1])
def test_a_sum_adds_in_the_order_of_the_workers(workers: int, entries: int) -> None:
    updates = [update(entries, seed=w, share=0.2 + 0.05 * w) for w in range(workers)]
    order, expected = reference_sum(updates)
    for threads in (0, 1, 2, 5):
        index = np.zeros(sum(len(i) for i, _ in updates), np.uint32)
        values = torch.full((len(index), 16), torch.nan)
        count = block_coo.sum_units([i for i, _ in updates], [v for _, v in updates], index, values, threads=threads)
        assert index[:count].tolist() == order
        assert (values[:count].view(torch.int32) == expected.view(torch.int32)).all()


def test_a_sum_of_many_blocks_has_the_same_bits_for_every_number_of_threads() -> None:
    updates = [update(2**19 + 1, seed=w, share=0.25) for w in range(3)]
    order, expected = reference_sum(updates)
    for threads in (1, 2, 8):
        index, values = np.zeros(len(order), np.uint32), torch.zeros(len(order), 16)
        count = block_coo.sum_units([i for i, _ in updates], [v for _, v in updates], index, values, threads=threads)
        assert count == len(order)
        assert index.tolist() == order
        assert (values.view(torch.int32) == expected.view(torch.int32)).all()


def test_a_sum_that_does_not_fit_writes_nothing() -> None:
    a, b = (np.array(i, np.uint32) for i in ([0, 1], [1, 2]))
    index, values = np.full(2, 9, np.uint32), torch.zeros(2, 16)
    with pytest.raises(BadInput, match="the sum has 3 units but out_index has room for 2"):
        block_coo.sum_units([a, b], [torch.ones(2, 16)] * 2, index, values)
    assert index.tolist() == [9, 9]
    assert not values.any()


def test_what_does_not_fit_is_refused_by_name() -> None:
    index, values, out = np.array([1, 2], np.uint32), torch.ones(2, 16), np.zeros(200, np.uint8)
    with pytest.raises(BadInput, match="out has 10 bytes, but the payload may need 138; ask payload_bound"):
        block_coo.encode(index, values, 48, out[:10])
    with pytest.raises(BadInput, match="index does not ascend, or reaches beyond the last of 2"):
        block_coo.encode(index, values, 32, out)
    with pytest.raises(BadInput, match="values has 16 entries, not 32"):
        block_coo.encode(index, values[:1], 48, out)
    with pytest.raises(BadInput, match="residual has 47 entries, not 48"):
        block_coo.encode(index, values, 48, out, residual=torch.zeros(47))
    with pytest.raises(BadInput, match="value_format = 'int3' is not known; pass one of float32, float16, bfloat16"):
        block_coo.payload_bound(1, value_format="int3")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="indices\\[1\\] does not ascend"):
        block_coo.sum_units([index, index[::-1].copy()], [values, values], np.zeros(4, np.uint32), torch.zeros(4, 16))
    with pytest.raises(BadInput, match="2 indices but 1 values"):
        block_coo.sum_units([index, index], [values], np.zeros(4, np.uint32), torch.zeros(4, 16))
    with pytest.raises(BadInput, match="65 workers; at most 64"):
        block_coo.sum_units([index] * 65, [values] * 65, np.zeros(4, np.uint32), torch.zeros(4, 16))
    with pytest.raises(BadInput, match="share memory"):
        block_coo.sum_units([index], [values], np.zeros(2, np.uint32), values)
