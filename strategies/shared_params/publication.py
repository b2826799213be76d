"""Writes of sparse blocks into a flat tensor: shared parameters into weights on a GPU, others' updates, parts of
residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from atoll.kernels import scatter_blocks
from atoll.kernels.compress import BLOCK_ENTRIES


def write_blocks(live: torch.Tensor, index: NDArray[np.uint32], values: NDArray[np.float32]) -> None:
    """Write values [k, 16] into blocks of `live` (flat, [n], any device and floating type); else as `add_blocks`.

    The tensor's version does not change, on any device: only the script's writes count it up."""
    with _unsafe_preserve_version_counter(live):
        scatter_blocks(live, on_device(index.view(np.int32), live.device), on_device(values, live.device))


@torch.no_grad()
def add_blocks(live: torch.Tensor, index: NDArray[np.integer[Any]], values: NDArray[np.float32]) -> None:
    """Add values [k, 16] to blocks of `live` (flat, [n], any device and floating type).

    index: [k], ascending, each below ceil(n / 16). Values beyond the end of a shorter last block are ignored. Returns
    once the work is queued on torch's current stream."""
    whole = live.numel() // BLOCK_ENTRIES
    blocks, added = on_device(index.astype(np.int64), live.device), on_device(values, live.device)
    if len(index) and int(index[-1]) == whole:  # checked on the CPU: a check on the GPU would wait for its queue
        tail = live[whole * BLOCK_ENTRIES :]
        tail.copy_(tail.float() + added[-1][: tail.numel()])  # rounded once, where live has 16 bits
        blocks, added = blocks[:-1], added[:-1]
    if blocks.numel():
        matrix = live[: whole * BLOCK_ENTRIES].view(whole, BLOCK_ENTRIES)
        matrix.index_copy_(0, blocks, (matrix.index_select(0, blocks).float() + added).to(live.dtype))


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a tensor of the same entries. On a GPU, work queued from now on sees it; the caller does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
