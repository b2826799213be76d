"""Adding sparse blocks to a flat tensor: what others did to weights on a GPU, parts that are residuals again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernels.compress import BLOCK_ENTRIES


@torch.no_grad()
def add_blocks(live: torch.Tensor, index: NDArray[np.integer[Any]], values: NDArray[np.float32]) -> None:
    """Add values [k, 16] to blocks of `live` (flat, [n], any device and floating type).

    index: [k], ascending, each below ceil(n / 16). Of a shorter last block only what there is counts."""
    whole = live.numel() // BLOCK_ENTRIES
    blocks = torch.from_numpy(index.astype(np.int64)).to(live.device)
    added = torch.from_numpy(values).to(live.device)
    if blocks.numel() and int(blocks[-1]) == whole:
        tail = live[whole * BLOCK_ENTRIES :]
        tail.copy_(tail.float() + added[-1][: tail.numel()])  # rounded once, where live has 16 bits
        blocks, added = blocks[:-1], added[:-1]
    if blocks.numel():
        matrix = live[: whole * BLOCK_ENTRIES].view(whole, BLOCK_ENTRIES)
        matrix.index_copy_(0, blocks, (matrix.index_select(0, blocks).float() + added).to(live.dtype))
