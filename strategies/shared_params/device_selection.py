"""Choice of a tensor's blocks on the device that has its gradient or its live weights. Only chosen blocks come to the
CPU.

It chooses as kernels/exchange/parts/selector.cpp does, with the same bits. For gradients the residual is on the device
too. The error of rounding to the wire's 16 bits is known on the CPU alone: it waits in the engine's residual of the
layer, and leaves when its block is next chosen. For live weights a reference is on the device: the weights' values if
they lacked nothing. Rounding errors stay in the difference of the two by themselves, whatever the values of the
wire."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from atoll.kernels import _native, compress
from atoll.kernels.compress import BLOCK_ENTRIES, Selection, block_count
from atoll.kernels.exchange_engine import Selection as Rule
from atoll.kernels.exchange_engine import UpdateEngine
from atoll.strategies.shared_params.layout import write_blocks

SAMPLED_BLOCKS: Final = 4096
Room = tuple[torch.Tensor, torch.Tensor]
"""index: int32 [k]; values: float32 [16 k]; both on the device."""
LARGEST_FLOAT: Final = torch.finfo(torch.float32).max


class ChosenBlocks(NamedTuple):
    """index: int32 [k]; values: float32 [k, 16]; both on the CPU."""

    index: torch.Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    values: torch.Tensor
    counted: Selection


class SelectionRoom:
    """Memory of a device that selections use one after the other. It grows to the size of the largest.

    Each selection is done before the next begins: the caller waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.empty(0, dtype=torch.int32, device=device)
        self._values, self._difference = torch.empty(0, device=device), torch.empty(0, device=device)

    def chosen(self, blocks: int) -> Room:
        if len(self._index) < blocks:
            self._index = self._index.new_empty(blocks)
            self._values = self._values.new_empty(blocks * BLOCK_ENTRIES)
        return self._index[:blocks], self._values[: blocks * BLOCK_ENTRIES]

    def difference(self, entries: int) -> torch.Tensor:
        """Return room for a difference, float32 [entries]."""
        if len(self._difference) < entries:
            self._difference = self._difference.new_empty(entries)
        return self._difference[:entries]


class DeviceSelector:
    """Selector of one tensor's blocks. One caller at a time, with the stream current on which it shall work."""

    def __init__(
        self,
        entries: int,
        device: torch.device,
        rule: Rule,
        room: SelectionRoom,
        *,
        error_feedback: bool,
        samples: bool = False,
    ) -> None:
        """room: of all selections of the device. samples: each threshold comes from a sample, not from how many blocks
        the rounds before chose."""
        self._entries, self._device, self._rule = entries, device, rule
        self._room, self._samples = room, samples
        self.residual = torch.zeros(entries, device=device) if error_feedback else None
        """Residual, float32 [N]; None: what is not sent is lost."""
        self._controller = _native.ThresholdController(1)

    def select(self, gradient: torch.Tensor | None, weight: float, k_blocks: int, seed: int) -> ChosenBlocks:
        """Choose at most `k_blocks` blocks of residual + weight * gradient; the rest becomes the residual.

        gradient: float32, float16 or bfloat16 [N] of the device; None, or weight 0: the residual alone. seed: for
        `random` selection, the same on all ranks. Waits for the device."""
        if gradient is None or weight == 0:
            gradient, weight = torch.zeros(self._entries, device=self._device), 0.0
        index, values = room = self._room.chosen(min(k_blocks, block_count(self._entries)))
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
        if self._samples or self._controller.needs_sample:
            scores = torch.empty(min(blocks, SAMPLED_BLOCKS), device=self._device)
            compress.sample_scores(gradient, self.residual, seed, scores, weight=weight)
            self._controller.start(scores.cpu(), blocks)
        threshold = min(self._controller.threshold, LARGEST_FLOAT)
        counted = compress.threshold_block(gradient, self.residual, threshold, index, values, weight=weight)
        self._controller.update(counted.found)
        return counted


class DeviceDifference:
    """Difference of a tensor's live weights, float32 on a device, from the shared parameters: 4 bytes an entry.

    Call `set` on the training thread, with nothing on its way. Call `select` on one thread, with the stream current on
    which it shall work, which follows the last update of the weights."""

    def __init__(self, engine: UpdateEngine, number: int, live: torch.Tensor, rule: Rule, room: SelectionRoom) -> None:
        """number: of the engine's tensor, which has no live weights there. live: [N], flat, as those selected."""
        self._engine, self._number, self._room = engine, number, room
        self._reference = torch.zeros_like(live)
        self._selector = DeviceSelector(len(live), live.device, rule, room, error_feedback=False, samples=True)
        self._sampled = torch.tensor(engine.drift_blocks(number), device=live.device)

    def set(self, shared_param: torch.Tensor) -> None:
        """Set the reference after the engine's `set_live`. Returns once the device has it.

        shared_param: float32 [N] on the CPU."""
        self._reference.copy_(shared_param)

    @torch.no_grad()
    def select(self, sync_round: int, live: torch.Tensor, weight: float, k_blocks: int) -> None:
        """Hand the engine the heaviest blocks of weight * (reference - live). Waits for the device: the weights may be
        written when it returns."""
        entries, blocks = len(live), block_count(len(live))
        write_blocks(self._reference, *self._engine.take_reference(self._number))
        padded_N = self._room.difference(blocks * BLOCK_ENTRIES)
        padded_N[entries:].zero_()
        # Two operations, each rounded, as on the CPU.
        difference_N = torch.sub(self._reference, live, out=padded_N[:entries]).mul_(weight)
        sample = padded_N.view(blocks, BLOCK_ENTRIES).index_select(0, self._sampled)
        seed = self._engine.selection_seed(sync_round, self._number)
        chosen = self._selector.select(difference_N, 1.0, k_blocks, seed)
        self._engine.compress_chosen_live(sync_round, self._number, chosen, sample.cpu(), weight)
