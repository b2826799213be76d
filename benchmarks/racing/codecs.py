"""Values of few bits, and which blocks are worth sending: what a decoder would see, and the bytes on the wire."""

from __future__ import annotations

import math
from typing import Final

import torch

BLOCK: Final = 16
"""Entries that are sent or left together, with one byte of index."""

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
    magnitudes, the means below and above the block's median."""
    match bits:
        case 32:
            return values_K
        case 16:
            return values_K.half().float()
        case 4:
            blocked = _blocked(values_K)
            scale = blocked.abs().amax(1, keepdim=True).half().float().clamp_min(1e-30) / 7
            return ((blocked / scale).round().clamp(-7, 7) * scale).reshape(-1)[: values_K.numel()]
        case 2:
            blocked = _blocked(values_K)
            size = blocked.abs()
            large = size > size.median(1, keepdim=True).values
            low = _mean(size, ~large)
            high = _mean(size, large)
            return (blocked.sign() * torch.where(large, high, low)).reshape(-1)[: values_K.numel()]
        case _:
            raise ValueError(f"no codec of {bits} bits")


def payload_bytes(entries: int, bits: int, *, indexed: bool, block: int = BLOCK) -> float:
    """Of `entries` values that were chosen by blocks (indexed), or of all."""
    blocks = math.ceil(entries / block)
    scales = {32: 0, 16: 0, 4: SCALE_BYTES, 2: 2 * SCALE_BYTES}[bits]
    return entries * bits / 8 + blocks * (scales + (1 if indexed else 0))


def _blocked(values_K: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-values_K.numel() // BLOCK) * BLOCK)
    padded[: values_K.numel()] = values_K
    return padded.view(-1, BLOCK)


def _mean(size: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (size * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
