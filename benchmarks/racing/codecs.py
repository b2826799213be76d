"""Values of few bits, and which blocks are worth sending: what a decoder would see, and the bytes on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    padded = values_N.new_zeros(blocks * BLOCK)
    padded[: values_N.numel()] = values_N.abs()
    scores = padded.view(blocks, BLOCK).sum(1)
    chosen = torch.zeros(blocks, dtype=torch.bool, device=values_N.device)
    chosen[scores.topk(max(1, round(density * blocks))).indices] = True
    return chosen.repeat_interleave(BLOCK)[: values_N.numel()]


class Blocks:
    """The heaviest blocks of each of several tensors that lie side by side, all at once: of tensor after tensor
    `top_blocks` and `rounded` in few bits are the same, and slower. Each has a whole number of blocks.

    device: of the tensors."""

    def __init__(self, sizes: Sequence[int], density: float, device: torch.device | None = None) -> None:
        blocks = torch.tensor([size // BLOCK for size in sizes], device=device)
        self._tensor = torch.arange(len(sizes), device=device).repeat_interleave(blocks)  # of each block
        self._start = (blocks.cumsum(0) - blocks)[self._tensor]
        kept = [max(1, round(density * (size // BLOCK))) if density < 1 else size // BLOCK for size in sizes]
        self._kept = torch.tensor(kept, device=device)[self._tensor]
        self.entries = sum(kept) * BLOCK
        """That are chosen."""
        chunks = [-(-one * BLOCK // CHUNK) for one in kept]
        self._rows = sum(chunks)
        begins = [sum(chunks[:at]) * CHUNK for at in range(len(kept))]
        places = [torch.arange(one * BLOCK, device=device) + at for one, at in zip(kept, begins, strict=True)]
        self._place = torch.cat(places)

    def chosen(self, values_N: torch.Tensor) -> torch.Tensor:
        """Mask bool [N]."""
        scores = values_N.abs().view(-1, BLOCK).sum(1)
        order = scores.argsort(descending=True)
        order = order[self._tensor[order].argsort(stable=True)]  # tensor by tensor, the heaviest first
        mask = torch.empty(len(scores), dtype=torch.bool, device=scores.device)
        mask[order] = torch.arange(len(scores), device=scores.device) - self._start < self._kept
        return mask.repeat_interleave(BLOCK)

    def part(self, values_N: torch.Tensor, bits: int) -> torch.Tensor:
        """What the receiver sees [N], zeros where nothing was chosen."""
        mask, part_N = self.chosen(values_N), torch.zeros_like(values_N)
        chosen_K = values_N[mask]
        if bits == 2:
            padded = values_N.new_zeros(self._rows * CHUNK)
            padded[self._place] = chosen_K
            part_N[mask] = rounded(padded, bits)[self._place]
        else:
            part_N[mask] = rounded(chosen_K, bits)
        return part_N


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
    padded = values_K.new_zeros(-(-values_K.numel() // length) * length)
    padded[: values_K.numel()] = values_K
    return padded.view(-1, length)


def _mean(size: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (size * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
