"""Tensors of the exchange engine: a large layer, or small neighbours that lie one behind another.

Each tensor of the engine has tasks, frames and a wait of its own in every sync round. They take a tenth of a
millisecond, however small the tensor is. So small parameters are moved into one piece of memory, and their blocks are
chosen, sent and summed together. Each parameter begins with a block of its own, so no block has entries of two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from atoll.kernels.compress import BLOCK_ENTRIES, block_count
from atoll.strategies.shared_params.layout import Layer, zeros

MOST_ENTRIES: Final = 256 * 1024
"""Largest number of entries of joined layers: choosing and coding so many takes as long as a task and a frame."""
MIN_TENSORS_PER_AGGREGATOR: Final = 2
"""Tensors for each aggregator in each turn, at least, if layers allow: so many can be divided evenly."""
_ALIGNED_BYTES: Final = 64  # of a layer's begin: as torch aligns what it allocates
_JOINED: Final = "_atoll_joined"  # of a parameter: the memory that it was moved to


@dataclass(slots=True, eq=False)
class EngineTensor:
    """One tensor of the engine. N entries; float32 on the CPU, except for live."""

    layers: Sequence[Layer]  # in the model's order
    shared_param: torch.Tensor  # [N]: of all layers, with gaps of zeros
    joined: torch.Tensor | None = None  # [N]: the weights of several
    number: int = -1  # in the engine
    aggregator_sum: torch.Tensor | None = None  # [N], on the aggregator: the ranks' sums less the shared parameters
    aggregator: int | None = None  # the rank that sums it; None: no aggregator

    @classmethod
    def of(cls, layer: Layer) -> EngineTensor:
        return cls([layer], layer.shared_param)

    @property
    def name(self) -> str:
        more = len(self.layers) - 1
        return self.layers[0].name + (f" and {more} behind it" if more else "")

    @property
    def live(self) -> torch.Tensor:
        """Return the weights' own memory, flat, [N]."""
        return self.layers[0].live if self.joined is None else self.joined

    @property
    def on_cpu(self) -> bool:
        return self.layers[0].on_cpu

    def k_blocks(self, share: float) -> int:
        """Return this share of the tensor's blocks, 1 at least."""
        blocks = block_count(self.shared_param.numel())
        return max(1, round(share * blocks)) if share < 1 else blocks

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[Layer, torch.Tensor]]:
        """Yield each layer with its part of `flat`, [N]: views."""
        for layer in self.layers:
            yield layer, flat[layer.at : layer.at + layer.shared_param.numel()]

    def given(self, number: int, aggregator_sum: torch.Tensor | None, aggregator: int | None) -> None:
        """Set the tensor's number, sum and aggregator in the engine, and those of its layers."""
        self.number, self.aggregator_sum, self.aggregator = number, aggregator_sum, aggregator
        for layer in self.layers:
            layer.number = number
        if aggregator_sum is not None:
            for layer, part in self.parts(aggregator_sum):
                layer.aggregator_sum = part


def joined(model: nn.Module, layers: Sequence[Layer], pieces: int) -> list[EngineTensor]:
    """Return tensors that have every layer once, small neighbours together, about `pieces` or more.

    They are the same on all ranks. Moves the shared parameters and weights of joined layers."""
    most = min(MOST_ENTRIES, sum(layer.shared_param.numel() for layer in layers) // pieces)
    own = _with_memory_of_their_own(model)
    alone: list[list[Layer]] = []
    together: dict[tuple[torch.dtype, torch.device], list[Layer]] = {}
    for layer in layers:
        kind = layer.parameter.dtype, layer.parameter.device
        room = most - sum(one.shared_param.numel() for one in together.get(kind, ()))
        if layer.shared_param.numel() > most or id(layer.parameter) not in own:
            alone.append([layer])
        elif kind in together and layer.shared_param.numel() <= room:
            together[kind].append(layer)
        else:
            together[kind] = [layer]
            alone.append(together[kind])
    return [_join(one) if len(one) > 1 else EngineTensor.of(one[0]) for one in alone]


def forward_tensors(model: nn.Module, tensors: Sequence[EngineTensor]) -> list[tuple[nn.Module, list[EngineTensor]]]:
    """Return each module whose forward pass needs tensors first, with these tensors.

    A module needs those of its own parameters, a compiled one those of all modules inside: a hook there would break
    its graph, which `fullgraph=True` refuses."""
    by_parameter = {id(layer.parameter): tensor for tensor in tensors for layer in tensor.layers}
    found, inside = [], set[nn.Module]()
    for module in model.modules():  # outer ones first
        if module in inside:
            continue
        if is_compiled := isinstance(module, torch._dynamo.OptimizedModule):
            inside.update(module.modules())
        own = [id(one) for one in module.parameters(recurse=is_compiled)]
        held = list({id(by_parameter[one]): by_parameter[one] for one in own if one in by_parameter}.values())
        if held:
            found.append((module, held))
    return found


@torch.no_grad()
def _join(layers: Sequence[Layer]) -> EngineTensor:
    first = layers[0].parameter
    aligned = max(BLOCK_ENTRIES, _ALIGNED_BYTES // first.element_size())
    ends = 0
    for layer in layers:
        layer.at = ends
        ends += -(-layer.shared_param.numel() // aligned) * aligned
    tensor = EngineTensor(layers, zeros(ends), torch.zeros(ends, dtype=first.dtype, device=first.device))
    assert tensor.joined is not None
    for layer, part in tensor.parts(tensor.shared_param):
        layer.shared_param = part.copy_(layer.shared_param)
    for layer, part in tensor.parts(tensor.joined):
        layer.parameter.data = layer.shaped(part.copy_(layer.live))
        setattr(layer.parameter, _JOINED, layer.parameter.untyped_storage().data_ptr())
    return tensor


def _with_memory_of_their_own(model: nn.Module) -> set[int]:
    """Return the parameters that may be moved, by id: as far as can be seen, no other object uses their memory."""
    held = [*model.parameters(), *model.buffers()]
    users: dict[int, int] = {}
    for one in held:
        users[one.untyped_storage().data_ptr()] = users.get(one.untyped_storage().data_ptr(), 0) + 1
    own = set()
    for one in model.parameters():
        memory = one.untyped_storage()
        whole = users[memory.data_ptr()] == 1 and memory.nbytes() == one.nbytes and not memory.is_shared()
        if type(one) is nn.Parameter and (whole or getattr(one, _JOINED, None) == memory.data_ptr()):
            own.add(id(one))
    return own
