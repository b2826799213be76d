"""Where each gradient lies in the flat buffers that are all-reduced.

Fixed for a model, so that sums are always added in the same order and two runs agree bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

MIB: Final = 1024 * 1024
# The gradients that come first leave first: a small bucket starts the network early. The rest are large enough for a
# thin link's bandwidth. Both as DDP does, so that comparisons compare the same thing.
FIRST_BUCKET_BYTES: Final = 1 * MIB
BUCKET_BYTES: Final = 25 * MIB


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter's place in its bucket, and whether its gradient came in this pass."""

    name: str
    parameter: nn.Parameter
    position: int  # in reverse model order
    bucket: Bucket = field(init=False)
    view: torch.Tensor = field(init=False)  # [parameter.shape], into bucket.flat
    used: torch.Tensor = field(init=False)  # [], behind the gradients in bucket.flat: > 0 if any rank had a gradient
    came: bool = False


@dataclass(slots=True, eq=False)
class Bucket:
    """A flat buffer [numel + number of slots]: the gradients, then one number for each slot that says it was used."""

    slots: list[Slot]
    flat: torch.Tensor = field(init=False)
    gradients: torch.Tensor = field(init=False)  # [numel], into flat
    used: torch.Tensor = field(init=False)  # [number of slots], into flat
    missing: int = 0

    def __post_init__(self) -> None:
        first = self.slots[0].parameter
        numel = sum(slot.parameter.numel() for slot in self.slots)
        self.flat = torch.zeros(numel + len(self.slots), dtype=first.dtype, device=first.device)
        self.gradients, self.used = self.flat[:numel], self.flat[numel:]
        offset = 0
        for index, slot in enumerate(self.slots):
            slot.bucket = self
            slot.view = self.flat[offset : offset + slot.parameter.numel()].view(slot.parameter.shape)
            slot.used = self.used[index]
            offset += slot.parameter.numel()


def lay_out(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Bucket]:
    """Buckets for the parameters that are trained, one dtype and device each, in the order in which they fill up
    during a backward pass (the reverse of the model's own order)."""
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    slots = [Slot(name, parameter, position) for position, (name, parameter) in enumerate(reversed(trained))]
    done: list[list[Slot]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    bytes_in: dict[tuple[torch.device, torch.dtype], int] = {}
    for slot in slots:
        kind = (slot.parameter.device, slot.parameter.dtype)
        filling.setdefault(kind, []).append(slot)
        bytes_in[kind] = bytes_in.get(kind, 0) + slot.parameter.numel() * slot.parameter.element_size()
        if bytes_in[kind] >= (BUCKET_BYTES if done else FIRST_BUCKET_BYTES):
            done.append(filling.pop(kind))
            bytes_in[kind] = 0
    rest = sorted(filling.values(), key=lambda chosen: chosen[-1].position)
    return [Bucket(chosen) for chosen in (*done, *rest)]
