from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.strategies.stale_sparse.publication import add_blocks


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
