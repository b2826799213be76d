from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from atoll.strategies.shared_params.layout import add_blocks, write_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entries", [16, 5, 64, 70])
def test_blocks_are_added_where_they_belong_and_rounded_once(dtype: torch.dtype, entries: int) -> None:
    generator = torch.Generator().manual_seed(entries)
    live = torch.randn(entries, generator=generator).to(dtype)
    blocks = -(-entries // 16)
    index = np.arange(0, blocks, 2, dtype=np.uint32)
    if index[-1] != blocks - 1:
        index = np.append(index, np.uint32(blocks - 1))
    values = torch.randn(len(index), 16, generator=generator).numpy()
    expected = live.float()
    for block, row in zip(index, values, strict=True):
        begin = int(block) * 16
        expected[begin : begin + 16] += torch.from_numpy(row[: entries - begin])
    add_blocks(live, index, values)
    assert torch.equal(live, expected.to(dtype))


def test_nothing_to_add_changes_nothing() -> None:
    live = torch.ones(20)
    add_blocks(live, np.empty(0, np.uint32), np.empty((0, 16), np.float32))
    assert torch.equal(live, torch.ones(20))


@pytest.mark.parametrize("entries", [64, 70])
@pytest.mark.parametrize("change", [add_blocks, write_blocks])
def test_changing_blocks_asks_nothing_of_the_device(change: Callable[..., None], entries: int) -> None:
    """A tensor on the meta device has no entries that could be looked at. To see whether the last block was the shorter
    one, the host waited for all that the GPU still had to do, layer by layer."""
    index = np.array([0, -(-entries // 16) - 1], np.uint32)
    live = torch.empty(entries, device="meta")
    change(live, index, np.ones((2, 16), np.float32))
    assert live.shape == (entries,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entries", [0, 1, 16, 1025])
def test_written_blocks_arrive_rounded_as_torch_rounds_and_the_others_stay(entries: int, dtype: torch.dtype) -> None:
    live = torch.full((entries,), 5.0, dtype=dtype)
    blocks = -(-entries // 16)
    index = np.arange(0, blocks, 2, dtype=np.uint32)  # of 65 blocks also the last, of one entry
    values = torch.randn(len(index), 16, generator=torch.Generator().manual_seed(1)) * 1e5
    write_blocks(live, index, values.numpy())
    expected = torch.full((blocks, 16), 5.0, dtype=dtype)
    expected[torch.from_numpy(index.astype(np.int64))] = values.to(dtype)
    assert torch.equal(live, expected.flatten()[:entries])


def test_shared_params_are_written_where_they_belong() -> None:
    live = torch.zeros(70)
    write_blocks(live, np.array([1, 4], np.uint32), np.full((2, 16), 3.0, np.float32))
    assert torch.equal(live.nonzero().flatten(), torch.cat([torch.arange(16, 32), torch.arange(64, 70)]))
