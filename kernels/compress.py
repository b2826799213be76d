"""Choose the part of a gradient that is worth sending, fused with error feedback (StellaTrain, section 3.2).

All selections compute v = residual + weight * gradient (without a residual: weight * gradient), move the chosen part of
v into the caller's buffers and leave the rest in the residual, so that emitted + residual is v, entry by entry and
exactly. A block is 16 entries, one cache line, counted from the tensor's start; its score is the sum of its magnitudes.
A shorter last block is emitted padded with zeros.

A block whose score is not finite is never chosen: its old residual stays, this step's gradient of it is dropped, and it
is counted in `nonfinite`. (A score is also not finite where 16 magnitudes add up beyond float32.) Element-wise
selections treat single entries so.

Shapes: N entries, K = index's length, the capacity. gradient, residual: float32 [N], any alignment; the residual is
updated in place, None turns error feedback off. index: uint32 or int32 [K]; values: float32 [K, 16] for blocks, [K] for
elements. Only the first `chosen` of both are written; indices ascend. The result has the same bits for every number of
threads and on every processor. `threads` is as for `atoll.kernels.squared_norm`. Whatever does not fit raises
`BadInput` and changes nothing.

On a CUDA device all buffers of a call are of that device, the work is queued on torch's current stream, and the bits
are the CPU's. Selections wait for their result; `sample_scores` returns once the work is queued.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from atoll.kernels import _native
from atoll.kernels.cuda_device import run

BLOCK_ENTRIES = 16


class Selection(NamedTuple):
    """The outcome of one selection, in blocks or elements."""

    chosen: int
    """Number written to index and values."""
    found: int
    """Number that qualified. If it exceeds `chosen`, the output was full: the later ones stay in the residual, and a
    controller that aims at the capacity raises its threshold."""
    nonfinite: int
    """Number left out, because they hold a NaN or an infinity."""


def block_count(entries: int) -> int:
    """Return the number of blocks in a tensor of so many entries."""
    return -(-entries // BLOCK_ENTRIES)


def threshold_block(
    gradient: Any, residual: Any, threshold: float, index: Any, values: Any, *, weight: float = 1.0, threads: int = 0
) -> Selection:
    """Select the blocks whose score exceeds threshold (finite, >= 0; rounded to float32): cache-aware threshold-v."""
    call = gradient, residual, weight, threshold, index, values
    return Selection(*run("threshold_block", _native.threshold_block, *call, threads=threads))


def topk_block(
    gradient: Any, residual: Any, index: Any, values: Any, *, weight: float = 1.0, threads: int = 0
) -> Selection:
    """Select the K blocks of the highest score; of equals the first.

    Blocks of zeros are never chosen, even if fewer than K are left, and do not count as found."""
    call = gradient, residual, weight, index, values
    return Selection(*run("topk_block", _native.topk_block, *call, threads=threads))


def random_block(
    gradient: Any, residual: Any, seed: int, index: Any, values: Any, *, weight: float = 1.0, threads: int = 0
) -> Selection:
    """Select min(K, blocks) random blocks: one of each of as many equal intervals of blocks, by the seed.

    The receiver knows their indices from the seed and expects all of them, so a block that is not finite is emitted as
    zeros; its old residual stays.
    """
    call = gradient, residual, weight, seed, index, values
    return Selection(*run("random_block", _native.random_block, *call, threads=threads))


def sample_scores(gradient: Any, residual: Any, seed: int, scores: Any, *, weight: float = 1.0) -> None:
    """Fill scores, float32 [S], S <= blocks, with the scores v has in S random blocks (-1: not finite).

    Changes nothing else. A threshold begins from them.
    """
    run("sample_scores", _native.sample_scores, gradient, residual, weight, seed, scores)
