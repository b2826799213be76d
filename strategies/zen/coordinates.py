"""Gradients in coordinate form: the non-zero units with their values, on the CPU.

Legend of suffixes: K = units that are there, W = entries of a unit, N = all units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernels import units

U32: TypeAlias = NDArray[np.uint32]
F32: TypeAlias = NDArray[np.float32]

DTYPES: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Dtypes that float32 holds without loss."""
MOST_UNITS: Final = 1 << 32
"""Number of units that 32-bit indices can name."""


class GradientLayout(IntFlag):
    """Layout of the ranks' gradients; NONE if no rank had one."""

    NONE = 0
    SPARSE = 1
    DENSE = 2


@dataclass(frozen=True, slots=True)
class SumTally:
    """Counts of a tensor in a pass that all ranks learn alike while they sum it."""

    layouts: GradientLayout = GradientLayout.NONE
    units: int = 0  # that ranks had, each rank's counted
    blocks: int = 0  # of 256 entries that ranks had
    distinct: int = 0  # values of units that ranks had, each rank's counted that are no repetition of another's
    goodput: float = math.inf  # bytes a second of the slowest link that was measured; inf: none was
    choice: int = 0  # rank 0's, of a scheme from the next pass on; 0: as it was

    def __add__(self, other: SumTally) -> SumTally:
        return SumTally(
            self.layouts | other.layouts,
            self.units + other.units,
            self.blocks + other.blocks,
            self.distinct + other.distinct,
            min(self.goodput, other.goodput),
            max(self.choice, other.choice),
        )


@dataclass(frozen=True, slots=True)
class UnitShape:
    """A tensor as `units` rows of `width` entries. A tensor of fewer than two dimensions has rows of one entry."""

    units: int
    width: int

    @staticmethod
    def of(tensor: torch.Tensor) -> UnitShape:
        if tensor.dim() < 2:
            return UnitShape(tensor.numel(), 1)
        return UnitShape(tensor.shape[0], max(tensor.numel() // max(tensor.shape[0], 1), 1))


def countable(tensor: torch.Tensor) -> bool:
    """Return whether its gradients can be converted to coordinates without loss."""
    return tensor.dtype in DTYPES and UnitShape.of(tensor).units <= MOST_UNITS


@dataclass(frozen=True, slots=True)
class Coordinates:
    """unit: uint32 [K], each once; values: float32 [K, W]."""

    unit: U32
    values: F32
    tally: SumTally = SumTally()

    def with_tally(self, tally: SumTally) -> Coordinates:
        return replace(self, tally=tally)


def nothing(width: int) -> Coordinates:
    """Return the coordinates of a rank without a gradient."""
    return Coordinates(np.zeros(0, np.uint32), np.zeros((0, width), np.float32))


def total(terms: Iterable[SumTally]) -> SumTally:
    return sum(terms, start=SumTally())


def summed(terms: list[Coordinates], shape: UnitShape, of: units.PartitionsOf | None = None) -> Coordinates:
    """Sum in the terms' order; units ascend. Raises BadInput for units outside the tensor."""
    unit_K, values_KW = units.sum_coordinates([(one.unit, one.values) for one in terms], shape.units, shape.width, of)
    return Coordinates(unit_K, values_KW, total(one.tally for one in terms))


def from_gradient(gradient: torch.Tensor | None, shape: UnitShape, weight: float) -> Coordinates:
    """Return weight * gradient in coordinates, units ascending. gradient: None, strided, or sparse and coalesced, of a
    dtype of DTYPES. With weight 0 it has no units."""
    if gradient is None:
        return nothing(shape.width)
    if gradient.is_sparse and gradient.sparse_dim() != 1:
        gradient = gradient.to_dense()
    tally = SumTally(GradientLayout.SPARSE if gradient.is_sparse else GradientLayout.DENSE)
    if weight == 0:
        return nothing(shape.width).with_tally(tally)
    if gradient.is_sparse:
        unit_K = gradient.indices()[0].cpu().numpy().astype(np.uint32)
        values_KW = gradient.values().reshape(len(unit_K), shape.width).cpu().float()
    else:
        unit_K, values_KW = _nonzero_units(gradient.reshape(shape.units, shape.width))
    scaled_KW = torch.mul(values_KW.detach().contiguous(), weight)
    return Coordinates(unit_K, scaled_KW.numpy(), replace(tally, units=len(unit_K)))


def _nonzero_units(dense_NW: torch.Tensor) -> tuple[U32, torch.Tensor]:
    if dense_NW.device.type == "cpu" and dense_NW.dtype == torch.float32:
        unit_K = units.nonzero_units(dense_NW.contiguous(), dense_NW.shape[1])
        return unit_K, dense_NW[torch.from_numpy(unit_K.astype(np.int64))]
    at_K = (dense_NW != 0).any(dim=1).nonzero()[:, 0]
    return at_K.cpu().numpy().astype(np.uint32), dense_NW[at_K].cpu().float()


def distinct_values(mine: Coordinates) -> int:
    """Count units whose value does not repeat another's; of single entries all count."""
    return len(mine.unit) if mine.values.shape[1] == 1 else len(units.distinct_rows(mine.values).first)


def to_gradient(sum_: Coordinates, like: torch.Tensor, out: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return these coordinates as the gradient of parameter `like`: sparse if all ranks' were, else in the memory that
    `out` returns, which is like it. None if no rank had a gradient. Units ascend."""
    if sum_.tally.layouts is GradientLayout.NONE:
        return None
    at_K = torch.from_numpy(sum_.unit.astype(np.int64)).to(like.device)
    values = torch.from_numpy(sum_.values).to(like.device, like.dtype)
    values = values.reshape(len(at_K), *like.shape[1:])
    if sum_.tally.layouts == GradientLayout.SPARSE:
        return torch.sparse_coo_tensor(at_K[None], values, like.shape, is_coalesced=True, check_invariants=False)
    dense = out()
    dense.zero_().index_copy_(0, at_K, values)
    return dense
