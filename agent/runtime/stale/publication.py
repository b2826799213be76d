"""Bringing what the others did into weights that live on a GPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernels.compress import BLOCK_ENTRIES


@torch.no_grad()
def add_blocks(live: torch.Tensor, index: NDArray[np.uint32], values: NDArray[np.float32]) -> None:
    """Add values [k, 16] to blocks of `live` (flat, [n], any device and floating type).

    index: [k], ascending, each below ceil(n / 16). Of a shorter last block only what there is counts."""
    whole = live.numel() // BLOCK_ENTRIES
    blocks = torch.from_numpy(index.astype(np.int64))
    wanted = torch.from_numpy(values).to(live.dtype)
    if blocks.numel() and int(blocks[-1]) == whole:
        tail = live[whole * BLOCK_ENTRIES :]
        tail += wanted[-1][: tail.numel()].to(live.device)
        blocks, wanted = blocks[:-1], wanted[:-1]
    if blocks.numel():
        matrix = live[: whole * BLOCK_ENTRIES].view(whole, BLOCK_ENTRIES)
        matrix.index_add_(0, blocks.to(live.device), wanted.to(live.device))
