"""Write updated blocks into a model's own weights."""

from __future__ import annotations

import sys
from typing import Any

from atoll.kernels.cuda_device import queue_of
from atoll.kernels.refusals import refusals

BLOCK_ENTRIES = 16


def scatter_blocks(live: Any, index: Any, values: Any) -> None:
    """Write live[16 k' : 16 k' + 16] = values[k] for k' = index[k], rounded to live's format as torch rounds.

    live: float32, float16 or bfloat16 torch tensor [N], contiguous, of any shape; entries of the last block beyond N
    are left out. index: int32 or uint32 [K], ascending; values: float32 [K, 16]: torch tensors, on the CPU NumPy arrays
    too.

    On a CUDA device all three are of that device, and it returns once the work is queued on torch's current stream.
    Indices are not checked there: blocks beyond the end are ignored. On the CPU, and on devices that this build has no
    code for, torch does the work. Such blocks and other misfits raise `BadInput` then, and change nothing."""
    with refusals("scatter_blocks"):
        if (queue := queue_of((live,))) is not None:
            queue.call("scatter_blocks", live, index, values)
        else:
            _scatter_by_torch(live, index, values)


def _scatter_by_torch(live: Any, index: Any, values: Any) -> None:
    torch = sys.modules.get("torch")  # never loaded here: whoever has a live copy of a model's weights has torch
    if torch is None or not isinstance(live, torch.Tensor):
        raise TypeError(f"live is a {type(live).__name__}; pass a torch tensor")
    if live.dtype not in {torch.float32, torch.float16, torch.bfloat16}:
        raise TypeError(f"live is {live.dtype}, not float32, float16 or bfloat16")
    if not live.is_contiguous():
        raise ValueError("live is not contiguous; pass a contiguous tensor or a flat view")
    at = torch.as_tensor(index).to(torch.int64).reshape(-1)
    rows = torch.as_tensor(values)
    if rows.dtype != torch.float32 or rows.numel() != len(at) * BLOCK_ENTRIES:
        raise ValueError(f"values has {rows.numel()} entries of {rows.dtype}, not {len(at)} x 16 of torch.float32")
    blocks, tail = -(-live.numel() // BLOCK_ENTRIES), live.numel() % BLOCK_ENTRIES
    if len(at) == 0:
        return
    if int(at[0]) < 0 or int(at[-1]) >= blocks or bool((at[1:] <= at[:-1]).any()):
        raise ValueError(f"index does not ascend, or reaches beyond the last of {blocks}")
    with torch.no_grad():
        flat, rows = live.view(-1), rows.reshape(-1, BLOCK_ENTRIES).to(live.dtype)
        if tail and int(at[-1]) == blocks - 1:
            flat[-tail:] = rows[-1, :tail]
            at, rows = at[:-1], rows[:-1]
        flat[: live.numel() - tail].view(-1, BLOCK_ENTRIES).index_copy_(0, at, rows)
