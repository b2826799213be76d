"""Finds where a buffer's kernels run: on the CPU, or on its CUDA device in the order of torch's current stream."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

_cuda: ModuleType | None
try:
    _cuda = importlib.import_module("atoll.kernels._cuda")
except ModuleNotFoundError:  # built without nvcc
    _cuda = None


class CudaQueue(NamedTuple):
    """The CUDA kernels, and the stream (a cudaStream_t) that their work goes to."""

    kernels: ModuleType
    stream: int


def built_with_cuda() -> bool:
    """Return whether this build has the CUDA kernels, whatever the machine has."""
    return _cuda is not None


def has_cuda() -> bool:
    """True if this build has the CUDA kernels and the machine a driver with a device for them."""
    return _cuda is not None and _cuda.device_count() > 0


def cuda_queue(buffer: Any) -> CudaQueue | None:
    """The queue of this buffer's work if it is a CUDA tensor; None: it is the CPU's.

    Raises ValueError, which the callers turn into BadInput, if this build has no CUDA kernels.
    """
    if not getattr(buffer, "is_cuda", False):
        return None
    if _cuda is None:
        raise ValueError(
            "the buffer is on a CUDA device, but this build has no CUDA part; reinstall atoll where nvcc is "
            "(CUDA_HOME), or move the buffer to the CPU"
        )
    # The caller has a torch tensor, so torch is loaded; this package never loads it.
    return CudaQueue(_cuda, int(sys.modules["torch"].cuda.current_stream(buffer.device).cuda_stream))
