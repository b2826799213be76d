"""Request huge pages for large buffers.

The sparse optimizers touch one cache line in many pages. With pages of 4 KiB nearly every block waits for the processor
to look up its page first, which took three times as long as the update itself (docs/performance.md, Kernels)."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from atoll.errors import BadInput

HUGE_PAGE_BYTES: Final = 2**21
MADV_HUGEPAGE: Final = 14  # linux/mman.h
MADV_COLLAPSE: Final = 25  # since Linux 6.1


def use_huge_pages(buffer: Any) -> bool:
    """Ask Linux to keep the buffer's memory in pages of 2 MiB: present pages, and those that are touched later.

    buffer: a contiguous CPU tensor or NumPy array; best called before it is first written, since present pages are
    copied. Its contents do not change. Less than a whole huge page is left alone. Return whether the kernel took the
    advice. It gives such pages if memory is free, and none if they are off (/sys/kernel/mm/transparent_hugepage/enabled
    says "never")."""
    begin, end = _span(buffer)
    begin, end = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if begin >= end:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    taken = bool(madvise(begin, end - begin, MADV_HUGEPAGE) == 0)
    # Fails where nothing is there yet, or the kernel is older: then pages come as they are touched, or in time.
    madvise(begin, end - begin, MADV_COLLAPSE)
    return taken


def _span(buffer: Any) -> tuple[int, int]:
    """Return the addresses of a buffer's begin and end."""
    if hasattr(buffer, "data_ptr") and not getattr(buffer, "is_cuda", False) and buffer.is_contiguous():
        begin = int(buffer.data_ptr())
        return begin, begin + int(buffer.numel()) * int(buffer.element_size())
    if hasattr(buffer, "__array_interface__") and buffer.flags["C_CONTIGUOUS"]:
        begin = int(buffer.__array_interface__["data"][0])
        return begin, begin + int(buffer.nbytes)
    raise BadInput(
        f"use_huge_pages: buffer is a {type(buffer).__name__}; pass a contiguous tensor of the CPU or a NumPy array"
    )
