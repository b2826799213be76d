"""Encode gradients as signs: a bit for each entry, and a mean magnitude or two for each block of 1,024.

Source: EF-signSGD (Karimireddy et al., 2019) with the blocks of Zheng et al., 2019; with two means 1-bit SGD (Seide et
al., 2014).

values, out: float32 [N]. bits: uint8 [ceil(N / 8)], little-endian, set if an entry is below zero. scales: float32 [B]
for B = ceil(N / 1024), or [B, 2] for two means: of entries not below zero, and of those below. All buffers of a call
are on one device; on a CUDA device it returns once the work is queued on torch's current stream. The bits are the same
for every number of threads and on every device."""

from __future__ import annotations

from typing import Any

from atoll.kernels import _native
from atoll.kernels.cuda_device import run

SIGN_BLOCK = 1024


def sign_blocks(entries: int) -> int:
    """Return the number of blocks of so many entries."""
    return -(-entries // SIGN_BLOCK)


def sign_bytes(entries: int) -> int:
    """Return the bytes of the bits of so many entries."""
    return -(-entries // 8)


def sign_encode(values: Any, bits: Any, scales: Any, *, two_sided: bool, threads: int = 0) -> None:
    """Write bits and scales; `values`, all finite, become the error of the code."""
    run("sign_encode", _native.sign_encode, values, bits, scales, two_sided, threads=threads)


def sign_add(bits: Any, scales: Any, out: Any, *, two_sided: bool, threads: int = 0) -> None:
    """Add the values that bits and scales encode to `out`."""
    run("sign_add", _native.sign_add, bits, scales, out, two_sided, threads=threads)
