"""Request huge pages for large tensors.

The sparse optimizers touch one cache line in many pages. With pages of 4 KiB nearly every block waits for the processor
to look up its page first, which took three times as long as the update itself (docs/performance.md, Kernels)."""

from __future__ import annotations

import ctypes
from typing import Any, Final

HUGE_PAGE_BYTES: Final = 2**21
MADV_HUGEPAGE: Final = 14  # linux/mman.h
MADV_COLLAPSE: Final = 25  # since Linux 6.1


def use_huge_pages(tensor: Any) -> bool:
    """Ask Linux to keep the tensor's memory in pages of 2 MiB: present pages, and those that are touched later.

    tensor: contiguous, on the CPU; best before it is first written, since present pages are copied. Its contents do not
    change. Less than a whole huge page is left alone. Return whether the kernel took the advice. It gives such pages if
    memory is free, and none if they are off (/sys/kernel/mm/transparent_hugepage/enabled says "never")."""
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if begin >= end:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    taken = bool(madvise(begin, end - begin, MADV_HUGEPAGE) == 0)
    # Fails where nothing is there yet, or the kernel is older: then pages come as they are touched, or in time.
    madvise(begin, end - begin, MADV_COLLAPSE)
    return taken
