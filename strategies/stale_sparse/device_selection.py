"""The choice of a layer's blocks on the device that has its gradient: the residual is there too, and only what is
chosen comes to the CPU.

Chooses as kernels/exchange/parts/selector.cpp does. What rounding to the wire's 16 bits takes away is known on the CPU
alone: it waits in the engine's residual of the layer and goes when its block is next chosen."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from atoll.kernels import _native, compress
from atoll.kernels.compress import BLOCK_ENTRIES, Selection, block_count
from atoll.kernels.exchange_engine import Selection as Rule

SAMPLED_BLOCKS: Final = 4096
Room = tuple[torch.Tensor, torch.Tensor]
"""index: int32 [k]; values: float32 [16 k]; both on the device."""
LARGEST_FLOAT: Final = torch.finfo(torch.float32).max


class ChosenBlocks(NamedTuple):
    """index: int32 [k]; values: float32 [k, 16]; both on the CPU."""

    index: torch.Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    values: torch.Tensor
    counted: Selection


class DeviceSelector:
    """One caller at a time, with the stream current on which it shall work."""

    def __init__(self, entries: int, device: torch.device, rule: Rule, *, error_feedback: bool) -> None:
        self._entries, self._device, self._rule = entries, device, rule
        self.residual = torch.zeros(entries, device=device) if error_feedback else None
        """float32 [N], None: what is not sent is lost."""
        self._controller = _native.ThresholdController(1)
        self._room = torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, device=device)

    def select(self, gradient: torch.Tensor | None, weight: float, k_blocks: int, seed: int) -> ChosenBlocks:
        """At most `k_blocks` blocks of residual + weight * gradient; the rest becomes the residual.

        gradient: float32, float16 or bfloat16 [N] of the device; None, or weight 0: the residual alone. seed: for
        `random` selection, the same on all ranks. Waits for the device."""
        if gradient is None or weight == 0:
            gradient, weight = torch.zeros(self._entries, device=self._device), 0.0
        index, values = room = self._room_for(min(k_blocks, block_count(self._entries)))
        self._controller.aim_at(k_blocks)
        counted = self._choose(gradient.float(), weight, seed, room)
        chosen = counted.chosen
        return ChosenBlocks(index[:chosen].cpu(), values[: chosen * BLOCK_ENTRIES].cpu(), counted)

    def _choose(self, gradient: torch.Tensor, weight: float, seed: int, room: Room) -> Selection:
        index, values = room
        if self._rule == "topk":
            return compress.topk_block(gradient, self.residual, index, values, weight=weight)
        if self._rule == "random":
            return compress.random_block(gradient, self.residual, seed, index, values, weight=weight)
        blocks = block_count(self._entries)
        if len(index) == blocks:
            return compress.threshold_block(gradient, self.residual, 0.0, index, values, weight=weight)
        if self._controller.needs_sample:
            scores = torch.empty(min(blocks, SAMPLED_BLOCKS), device=self._device)
            compress.sample_scores(gradient, self.residual, seed, scores, weight=weight)
            self._controller.start(scores.cpu(), blocks)
        threshold = min(self._controller.threshold, LARGEST_FLOAT)
        counted = compress.threshold_block(gradient, self.residual, threshold, index, values, weight=weight)
        self._controller.update(counted.found)
        return counted

    def _room_for(self, blocks: int) -> Room:
        if len(self._room[0]) < blocks:
            self._room = (
                torch.empty(blocks, dtype=torch.int32, device=self._device),
                torch.empty(blocks * BLOCK_ENTRIES, device=self._device),
            )
        return self._room[0][:blocks], self._room[1][: blocks * BLOCK_ENTRIES]
