"""Native kernels on float32 buffers; zero-copy from torch and NumPy, GIL released.

A buffer is a dense, contiguous float32 torch tensor, NumPy array or anything else that shares its memory through
DLPack or the buffer protocol, of any shape (it is read as one flat row of entries) and alignment. Selections, signs and
scattered blocks also take torch tensors on a CUDA device (`atoll.kernels.cuda_device`); all buffers of a call are on
one device. Whatever does not fit raises `atoll.errors.BadInput` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atoll.kernels import _native
from atoll.kernels.cuda_device import built_with_cuda, has_cuda
from atoll.kernels.refusals import refusals
from atoll.kernels.scatter import scatter_blocks

if TYPE_CHECKING:
    from atoll.kernels._native import CpuFeatures

__all__ = ["built_with_cuda", "cpu_features", "has_cuda", "scatter_blocks", "squared_norm", "weighted_sum"]


def squared_norm(x: Any, threads: int = 0) -> float:
    """Sum of the squares of all entries, accumulated in float64.

    x: float32, any length; 0.0 if it is empty. NaN gives NaN, an infinity gives infinity.
    threads: 1..256, or 0: one for a short buffer, else the cores this process may use (at most OMP_NUM_THREADS).
    The result has the same bits for every number of threads and on every processor.
    """
    with refusals("squared_norm"):
        return _native.squared_norm(x, threads)


def weighted_sum(out: Any, inputs: Sequence[Any], weights: Sequence[float], threads: int = 0) -> None:
    """out = weights[0] * inputs[0] + weights[1] * inputs[1] + ..., entry by entry.

    out: float32, overwritten; may itself be among the inputs (in place), but not overlap one by a part.
    inputs: at most 128, each as long as out; with none, out becomes 0.
    weights: one for each input; rounded to float32, as is every product and every sum, from the first input to the
    last: the bits are those of the same expression in NumPy, for every number of threads. NaN and infinities
    propagate as IEEE 754 says, also under a weight of 0.
    threads: as for `squared_norm`.
    """
    with refusals("weighted_sum"):
        _native.weighted_sum(out, inputs, weights, threads)


def cpu_features() -> CpuFeatures:
    """Describe the processor: `path`, "avx2" or "portable" (same bits), and `threads`, those used for threads=0."""
    return _native.cpu_features()
