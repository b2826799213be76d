"""Codes of every entry: half precision, integers of eight and four bits, and signs."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import nn

from atoll.kernels.signs import sign_add, sign_blocks, sign_bytes, sign_encode
from atoll.strategies.compressed.codes.compressors import CodePlace, Payload, as_payload, expect_bytes, read

FLOAT16_MOST = 32_768.0
INTEGER_BLOCK = 16
"""Entries that share a scale."""


class Float16:
    """Code of half precision, after a scale that is a power of two and keeps the largest entry finite.

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


class BlockIntegers:
    """Code of integers: multiples of a scale for each block of 16, its largest magnitude over 127, or over 7.

    Payload: bfloat16 [B] scales, then int8 [N], or uint8 [ceil(N / 2)] of two each, 8 added, the first in the lower
    bits."""

    divisible = True

    def __init__(self, bits: Literal[4, 8]) -> None:
        self._bits, self._most = bits, (1 << bits - 1) - 1

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        entries = len(value_N)
        residual_N.add_(value_N)
        padded_BK = _blocks(residual_N)
        scale_B = padded_BK.abs().amax(dim=1).div_(self._most).bfloat16()
        wide_BK = scale_B.float().unsqueeze(1)
        # A scale may be rounded down, or to zero: the nearest multiple that there is.
        times_BK = torch.where(wide_BK > 0, padded_BK / wide_BK, 0).round_().clamp_(-self._most, self._most)
        residual_N.sub_((times_BK * wide_BK).view(-1)[:entries])
        times_N = times_BK.view(-1)[:entries]
        return as_payload(scale_B.view(torch.int16), times_N.to(torch.int8) if self._bits == 8 else _paired(times_N))

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        entries, device = len(out_N), out_N.device
        blocks = -(-entries // INTEGER_BLOCK)
        behind = 2 * blocks
        expect_bytes(payload, behind + (entries if self._bits == 8 else -(-entries // 2)))
        scale_B = read(payload, "<i2", 0, blocks, device).view(torch.bfloat16).float()
        if self._bits == 8:
            times_N = read(payload, "i1", behind, entries, device).float()
        else:
            pair = read(payload, "u1", behind, -(-entries // 2), device)
            times_N = torch.stack([pair & 15, pair >> 4], dim=1).view(-1)[:entries].float() - 8
        out_N.add_((_blocks(times_N) * scale_B.unsqueeze(1)).view(-1)[:entries])

    def ratio(self, place: CodePlace, entries: int) -> float:
        return (self._bits + 16 / INTEGER_BLOCK) / 32


def _blocks(entry_N: torch.Tensor) -> torch.Tensor:
    """Return blocks [B, 16], with zeros behind the last entry."""
    return nn.functional.pad(entry_N, (0, -len(entry_N) % INTEGER_BLOCK)).view(-1, INTEGER_BLOCK)


def _paired(times_N: torch.Tensor) -> torch.Tensor:
    whole = nn.functional.pad(times_N, (0, len(times_N) % 2)).add(8).to(torch.uint8).view(-1, 2)
    return whole[:, 0] | whole[:, 1] << 4


class Signs:
    """Code of signs: a bit for each entry and for each block of 1,024 a mean magnitude, or one for each sign.

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
