from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.strategies.shared_params import layout
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
def test_adding_blocks_asks_nothing_of_the_device(entries: int) -> None:
    """A tensor on the meta device has no entries that could be looked at. To see whether the last block was the shorter
    one, the host waited for all that the GPU still had to do, layer by layer."""
    index = np.array([0, -(-entries // 16) - 1], np.uint32)
    live = torch.empty(entries, device="meta")
    add_blocks(live, index, np.ones((2, 16), np.float32))
    assert live.shape == (entries,)


def test_shared_params_come_to_weights_on_a_device_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index and values were the host's, beside weights on a GPU: no exchange of gradients trained there."""
    came: list[torch.Tensor] = []
    monkeypatch.setattr(layout, "scatter_blocks", lambda *buffers: came.extend(buffers))
    live = torch.empty(70, device="meta")
    write_blocks(live, np.array([0, 4], np.uint32), np.ones((2, 16), np.float32))
    assert [(one.device.type, one.dtype) for one in came[1:]] == [("meta", torch.int32), ("meta", torch.float32)]


def test_shared_params_are_written_where_they_belong() -> None:
    live = torch.zeros(70)
    write_blocks(live, np.array([1, 4], np.uint32), np.full((2, 16), 3.0, np.float32))
    assert torch.equal(live.nonzero().flatten(), torch.cat([torch.arange(16, 32), torch.arange(64, 70)]))
