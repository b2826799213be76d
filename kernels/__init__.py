"""Native kernels on float32 buffers; zero-copy from torch and NumPy, GIL released.

A buffer is a dense, contiguous float32 torch tensor, NumPy array or anything else that shares its memory through
DLPack or the buffer protocol, of any shape (it is read as one flat row of entries) and alignment. Selections and signs
also take torch tensors on a CUDA device (`atoll.kernels.cuda_device`); all buffers of a call are on
one device. Whatever does not fit raises `atoll.errors.BadInput` and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.kernels import _native
from atoll.kernels.cuda_device import has_cuda
from atoll.kernels.refusals import refusals

if TYPE_CHECKING:
    from atoll.kernels._native import CpuFeatures

__all__ = ["cpu_features", "has_cuda", "squared_norm"]


def squared_norm(x: Any, threads: int = 0) -> float:
    """Sum of the squares of all entries, accumulated in float64.

    x: float32, any length; 0.0 if it is empty. NaN gives NaN, an infinity gives infinity.
    threads: 1..256, or 0: one for a short buffer, else the cores this process may use (at most OMP_NUM_THREADS).
    The result has the same bits for every number of threads and on every processor.
    """
    with refusals("squared_norm"):
        return _native.squared_norm(x, threads=threads)


def cpu_features() -> CpuFeatures:
    """Describe the processor: `path`, "avx2" or "portable" (same bits), and `threads`, those used for threads=0."""
    return _native.cpu_features()
