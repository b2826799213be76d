"""Bringing changed blocks from the masters into weights that live on a GPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernels.compress import BLOCK_ENTRIES


@torch.no_grad()
def scatter_blocks(live: torch.Tensor, index: NDArray[np.uint32], values: NDArray[np.float32]) -> None:
    """Overwrite blocks of `live` (flat, [n], any device and floating type) with values [k, 16].

    index: [k], each below ceil(n / 16), none twice. Of a shorter last block only what there is is written."""
    whole = live.numel() // BLOCK_ENTRIES
    blocks = torch.from_numpy(index.astype(np.int64))
    wanted = torch.from_numpy(values).to(live.dtype)
    inside = blocks < whole
    if not bool(inside.all()):
        tail = live[whole * BLOCK_ENTRIES :]
        tail.copy_(wanted[~inside][-1][: tail.numel()])
        blocks, wanted = blocks[inside], wanted[inside]
    if blocks.numel():
        asynchronous = live.device.type != "cpu"
        matrix = live[: whole * BLOCK_ENTRIES].view(whole, BLOCK_ENTRIES)
        matrix.index_copy_(
            0,
            blocks.to(live.device, non_blocking=asynchronous),
            wanted.to(live.device, non_blocking=asynchronous),
        )
