"""Pieces in which gradients are reduced: flat buffers of many, or one by itself.

Fixed for a model, so that sums are always added in the same order and two runs agree bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from atoll.agent.runtime.model.inputs import SeveralModels
from atoll.agent.runtime.model.memory_order import laid_out_as
from atoll.agent.runtime.strategy_interface.capabilities import SeparateReducer, TensorReducer


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter's place in its bucket, and whether its gradient came in this pass."""

    name: str
    parameter: nn.Parameter
    bucket: Bucket = field(init=False)
    view: torch.Tensor = field(init=False)  # shape and strides of the parameter, into bucket.flat
    used: torch.Tensor = field(init=False)  # [], behind the gradients in bucket.flat: > 0 if any rank had a gradient
    came: bool = False


@dataclass(slots=True, eq=False)
class Bucket:
    """A flat buffer [numel + number of slots]: the gradients, then one number for each slot that says it was used."""

    slots: list[Slot]
    model: int = 0  # of several that train together, the place
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
            slot.view = laid_out_as(self.flat[offset : offset + slot.parameter.numel()], slot.parameter)
            slot.used = self.used[index]
            offset += slot.parameter.numel()

    def open(self) -> None:
        """A pass begins: no gradient has come."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.came = False

    def mark_used(self) -> None:
        """Note the slots of which this rank has a gradient."""
        self.used.fill_(1)
        if self.missing:
            for slot in self.slots:
                if not slot.came:
                    slot.used.zero_()


@dataclass(slots=True, eq=False)
class Separate:
    """One parameter whose gradient is reduced by itself, in the layout in which it came."""

    index: int  # as the reducer counts
    name: str
    parameter: nn.Parameter
    gradient: torch.Tensor | None = None  # [parameter.shape] of this rank, coalesced where it is sparse
    came: bool = False

    @property
    def missing(self) -> int:
        return 0 if self.came else 1

    def open(self) -> None:
        """A pass begins: no gradient has come."""
        self.gradient, self.came = None, False


def lay_out(model: nn.Module, reducer: TensorReducer) -> list[Bucket | Separate]:
    """Pieces of the parameters that are trained, in the order in which they leave; none has those of two models."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained.reverse()
    models = list(model) if isinstance(model, SeveralModels) else [model]
    owner = {id(one): place for place, part in reversed([*enumerate(models)]) for one in part.parameters()}
    separate = reducer.separate if isinstance(reducer, SeparateReducer) else (lambda _piece: False)
    pieces: list[Bucket | Separate] = []
    for fused in reducer.fuse([parameter for _, parameter in trained]):
        if separate(fused):
            pieces.append(Separate(fused[0], *trained[fused[0]]))
            continue
        by_model: dict[int, list[Slot]] = {}
        for name, parameter in (trained[index] for index in fused):
            by_model.setdefault(owner[id(parameter)], []).append(Slot(name, parameter))
        pieces += [Bucket(slots, place) for place, slots in by_model.items()]
    return pieces
