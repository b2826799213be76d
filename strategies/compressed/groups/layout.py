"""Lay out a model's tensors in the order of the backward pass, and the groups that a plan makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import nn

from atoll.agent.runtime.model.memory_order import memory_shape
from atoll.strategies.compressed.groups.options import TensorGroup, Way, by_size

COMPRESSIBLE: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
MOST_ENTRIES: Final = 1 << 27
"""Entries of a compressed group: its message fits a frame even if it is sent whole."""
GRADIENT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Layout of N tensors. shapes: of each, the slowest dimension in memory first. first: the number of entries before
    each tensor, and of all."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[torch.dtype, torch.device], ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> TensorLayout:
        sizes = [parameter.numel() for parameter in parameters]
        return cls(
            tuple(names),
            tuple(memory_shape(parameter) for parameter in parameters),
            tuple((parameter.dtype, parameter.device) for parameter in parameters),
            tuple(accumulate(sizes, initial=0)),
        )

    @property
    def entries(self) -> int:
        return self.first[-1]

    def size(self, begin: int, end: int) -> int:
        """Return the number of entries of tensors [begin, end)."""
        return self.first[end] - self.first[begin]

    def by_size(self, min_bytes: int, way: Way) -> list[TensorGroup]:
        """Group tensors by the rule of this name, within the limits."""
        sizes = [self.size(index, index + 1) * GRADIENT_BYTES for index in range(len(self.names))]
        return self.allowed(by_size(sizes, min_bytes, way))

    def allowed(self, groups: Sequence[TensorGroup]) -> list[TensorGroup]:
        """Return the groups cut at changes of dtype or device and at the largest message; tensors that cannot be
        compressed are not."""
        found: list[TensorGroup] = []
        for group in groups:
            begin = group.begin
            for index in range(group.begin, group.end):
                dtype, _ = self.kinds[index]
                way = group.way if dtype in COMPRESSIBLE and self.size(index, index + 1) <= MOST_ENTRIES else Way()
                fits = (
                    index > begin
                    and self.kinds[index] == self.kinds[begin]
                    and found[-1].way == way
                    and self.size(begin, index + 1) <= MOST_ENTRIES
                )
                if fits:
                    found[-1] = TensorGroup(begin, index + 1, way)
                else:
                    begin = index
                    found.append(TensorGroup(index, index + 1, way))
        return found
