"""Codes that say something of every entry: half precision, and signs."""

from __future__ import annotations

import numpy as np
import torch

from atoll.kernels.signs import sign_add, sign_blocks, sign_bytes, sign_encode
from atoll.strategies.compressed.compressors import CodePlace, Payload, as_payload, expect_bytes, read

FLOAT16_MOST = 32_768.0


class Float16:
    """Each entry in half precision, after a scale that is a power of two and keeps the largest finite.

    Payload: float32 [1] scale, float16 [N]."""

    divisible = True

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        residual_N.add_(value_N)
        largest = residual_N.abs().max() if len(residual_N) else residual_N.new_zeros(())
        # 2^e with largest / 2^e in (FLOAT16_MOST / 2, FLOAT16_MOST]: small gradients keep their precision too.
        exponent = torch.ceil(torch.log2(largest / FLOAT16_MOST)).clamp(-126, 126)
        scale = torch.where(largest > 0, torch.exp2(exponent), torch.ones_like(largest)).reshape(1)
        half_N = residual_N.div(scale).half()
        residual_N.sub_(half_N.float().mul_(scale))
        return as_payload(scale, half_N)

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        expect_bytes(payload, 4 + 2 * len(out_N))
        scale = read(payload, "<f4", 0, 1, out_N.device)
        out_N.add_(read(payload, "<f2", 4, len(out_N), out_N.device).float().mul_(scale))

    def ratio(self, place: CodePlace, entries: int) -> float:
        return 0.5


class Signs:
    """A bit for each entry and for each block of 1,024 a mean magnitude, or one for each sign.

    Payload: float32 [B] or [B, 2] means, uint8 [ceil(N / 8)] bits."""

    divisible = True

    def __init__(self, *, two_sided: bool) -> None:
        self._two_sided, self._means = two_sided, 2 if two_sided else 1

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        entries = len(value_N)
        residual_N.add_(value_N)
        bits = torch.empty(sign_bytes(entries), dtype=torch.uint8, device=value_N.device)
        scales = torch.empty(sign_blocks(entries) * self._means, device=value_N.device)
        sign_encode(residual_N, bits, scales, two_sided=self._two_sided)
        return as_payload(scales, bits)

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        entries = len(out_N)
        scales, size = sign_blocks(entries) * self._means, sign_bytes(entries)
        expect_bytes(payload, 4 * scales + size)
        sign_add(
            read(payload, np.uint8, 4 * scales, size, out_N.device),
            read(payload, "<f4", 0, scales, out_N.device),
            out_N,
            two_sided=self._two_sided,
        )

    def ratio(self, place: CodePlace, entries: int) -> float:
        return 1 / 32 + self._means / 1024
