"""Values of few bits, and which blocks are worth sending: what a decoder would see, and the bytes on the wire."""

from __future__ import annotations

import math
from typing import Final

import torch

BLOCK: Final = 16
"""Entries that are sent or left together, with one byte of index."""

CHUNK: Final = 512
"""Values that share their two magnitudes where they have 2 bits."""

SCALE_BYTES: Final = 2


def top_blocks(values_N: torch.Tensor, density: float) -> torch.Tensor:
    """Mask bool [N] of the blocks of 16 with the largest L1 norm; the last block may be short."""
    if density >= 1:
        return torch.ones_like(values_N, dtype=torch.bool)
    blocks = -(-values_N.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK)
    padded[: values_N.numel()] = values_N.abs()
    scores = padded.view(blocks, BLOCK).sum(1)
    chosen = torch.zeros(blocks, dtype=torch.bool)
    chosen[scores.topk(max(1, round(density * blocks))).indices] = True
    return chosen.repeat_interleave(BLOCK)[: values_N.numel()]


def rounded(values_K: torch.Tensor, bits: int) -> torch.Tensor:
    """Values [K] as the receiver sees them. 32, 16: floats; 4: absmax of each block of 16; 2: sign and one of two
    magnitudes, the means below and above the median of each 512."""
    match bits:
        case 32:
            return values_K
        case 16:
            return values_K.half().float()
        case 4:
            blocked = _cut(values_K, BLOCK)
            scale = blocked.abs().amax(1, keepdim=True).half().float().clamp_min(1e-30) / 7
            return ((blocked / scale).round().clamp(-7, 7) * scale).reshape(-1)[: values_K.numel()]
        case 2:
            blocked = _cut(values_K, CHUNK)
            size = blocked.abs()
            there = size > 0
            middle = size.masked_fill(~there, torch.nan).nanmedian(1, keepdim=True).values.nan_to_num()
            large = size > middle
            levels = torch.where(large, _mean(size, large), _mean(size, there & ~large))
            return (blocked.sign() * levels).reshape(-1)[: values_K.numel()]
        case _:
            raise ValueError(f"no codec of {bits} bits")


def payload_bytes(entries: int, bits: int, *, indexed: bool) -> float:
    """Of `entries` values that were chosen by blocks (indexed), or of all."""
    scales = {32: 0, 16: 0, 4: math.ceil(entries / BLOCK), 2: 2 * math.ceil(entries / CHUNK)}[bits]
    return entries * bits / 8 + scales * SCALE_BYTES + (math.ceil(entries / BLOCK) if indexed else 0)


def _cut(values_K: torch.Tensor, length: int) -> torch.Tensor:
    padded = torch.zeros(-(-values_K.numel() // length) * length)
    padded[: values_K.numel()] = values_K
    return padded.view(-1, length)


def _mean(size: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (size * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
