"""Values of few bits on the wire: what the receiver sees against the same rule in torch, and what is refused."""

from __future__ import annotations

import block_coo
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadInput
from atoll.kernels.exchange_engine import Values

FEW_BITS: list[Values] = ["int8", "int4", "int2"]
BYTES = {"int8": 16 + 2, "int4": 8 + 2, "int2": 4}  # of a block of 16; of int2 beside 4 bytes for each 32 blocks


def there_and_back(
    values_KB: torch.Tensor, entries: int, value_format: Values
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """What a receiver sees of all blocks [K, 16], the payload's bytes, and what is left in a residual of zeros."""
    index = np.arange(len(values_KB), dtype=np.uint32)
    layout = {"indices": "none", "value_format": value_format}
    out = np.zeros(block_coo.payload_bound(len(index), **layout), np.uint8)
    residual = torch.zeros(entries)
    used = block_coo.encode(index, values_KB, entries, out, residual=residual, **layout)
    seen = torch.full_like(values_KB, torch.nan)
    block_coo.decode(out[:used], entries, index, seen, **layout)
    return seen, used, residual


def scaled(values: torch.Tensor, steps: int) -> torch.Tensor:
    """int8 and int4 of a block of 16: multiples of the largest magnitude over `steps`, in bfloat16."""
    scale = (values.abs().amax(1, keepdim=True) / steps).bfloat16().float()
    ratio = (values / scale).nan_to_num()
    return (ratio.sign() * (ratio.abs() + 0.5).floor()).clamp(-steps, steps) * scale


def two_magnitudes(values: torch.Tensor) -> torch.Tensor:
    """int2 of one group: sign, and the mean of the magnitudes on its side of a limit."""
    size = values.abs()
    low = high = size.mean()
    for _ in range(2):
        limit = (low + high) / 2
        above = size > limit
        low = size[~above].mean() if (~above).any() else size[above].mean()
        high = size[above].mean() if above.any() else low
    levels = torch.where(size > (low + high) / 2, high.bfloat16().float(), low.bfloat16().float())
    return torch.where(values < 0, -levels, levels)


@pytest.mark.parametrize("value_format", FEW_BITS)
@settings(max_examples=40, deadline=None)
@given(blocks=st.integers(1, 70), scale=st.sampled_from([1e-30, 1e-7, 1.0, 1e30]), seed=st.integers(0, 1000))
def test_the_receiver_sees_what_the_rule_says(value_format: Values, blocks: int, scale: float, seed: int) -> None:
    values = scale * torch.randn(blocks, 16, generator=torch.Generator().manual_seed(seed))
    seen, used, residual = there_and_back(values, blocks * 16, value_format)
    if value_format == "int2":
        groups = [two_magnitudes(group) for group in values.split(32)]
        torch.testing.assert_close(seen, torch.cat(groups), rtol=1e-2, atol=0)
        assert used == 4 * blocks + 4 * -(-blocks // 32)
    else:
        torch.testing.assert_close(seen, scaled(values, 127 if value_format == "int8" else 7), rtol=1e-5, atol=0)
        assert used == BYTES[value_format] * blocks
    torch.testing.assert_close(seen + residual.view(-1, 16), values, rtol=1e-4, atol=1e-6 * scale)


def test_more_bits_come_nearer() -> None:
    """Error of normal values over their norm: 0.34 of two bits (0.36 where the limit is the median), 0.1, 0.006."""
    values = torch.randn(1000, 16, generator=torch.Generator().manual_seed(1))
    errors = {}
    for value_format in FEW_BITS:
        seen, _, _ = there_and_back(values, 16000, value_format)
        errors[value_format] = float((seen - values).norm() / values.norm())
    assert errors["int8"] < 0.007 < errors["int4"] < 0.12 < errors["int2"] < 0.355


@pytest.mark.parametrize("value_format", FEW_BITS)
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-38, 3.4028234e38, -3.4028234e38])
def test_extremes_stay_finite(value_format: Values, value: float) -> None:
    values = torch.full((3, 16), value)
    seen, _, residual = there_and_back(values, 48, value_format)
    assert seen.isfinite().all()
    assert residual.isfinite().all()
    assert (seen.abs() <= values.abs() * 1.1 + 1e-39).all()
    if abs(value) > 1e-37:
        torch.testing.assert_close(seen, values, rtol=0.01, atol=0)


@pytest.mark.parametrize("value_format", FEW_BITS)
def test_scales_that_are_not_finite_are_refused(value_format: Values) -> None:
    index = np.zeros(1, np.uint32)
    payload = bytearray(block_coo.payload_bound(1, indices="none", value_format=value_format))
    payload[0:2] = (0x7FC0).to_bytes(2, "little")  # NaN in bfloat16
    with pytest.raises(BadInput, match="values that are not finite"):
        block_coo.decode(bytes(payload), 16, index, torch.zeros(1, 16), indices="none", value_format=value_format)


def test_what_lies_beyond_the_tensor_comes_out_as_zero() -> None:
    """Two bits have no zero: the 15 values of a last block of one entry must not reach anybody's memory."""
    values = torch.zeros(2, 16)
    values[0] = 1.0
    values[1, 0] = 1.0
    index = np.array([0, 1], np.uint32)
    out = np.zeros(block_coo.payload_bound(2, value_format="int2"), np.uint8)
    used = block_coo.encode(index, values, 17, out, value_format="int2")
    seen = torch.full((2, 16), torch.nan)
    block_coo.decode(out[:used], 17, index, seen, value_format="int2")
    assert not seen[1, 1:].any()
