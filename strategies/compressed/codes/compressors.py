"""Algorithms that compress gradients, behind one interface.

N entries. What is compressed is value + residual; what of it the payload does not stand for becomes the residual, so
that nothing is lost (error feedback). Tensors are float32, flat, on any one device; payloads are bytes, little-endian.
What comes from another rank is checked before it is used: decompress raises BadInput for what cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import BadInput

Payload: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CodePlace:
    """Where in the run something is compressed: the same on all ranks. tensors: shapes, in the order of the entries;
    empty where it is a part of a group. density: of this step."""

    round: int
    first: int  # entry of the model, of the first one here
    tensors: tuple[tuple[int, ...], ...] = ()
    density: float = 1.0


class Compressor(Protocol):
    """One algorithm."""

    divisible: bool
    """Whether any range of entries can be compressed by itself."""

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        """value_N: read, finite. residual_N: in place, what is left out."""

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        """Add what it stands for to out_N. The same bits on every rank. Raises BadInput; then out_N may be anything."""

    def ratio(self, place: CodePlace, entries: int) -> float:
        """Bytes of a payload for each of the gradient's, about."""


def as_payload(*parts: torch.Tensor) -> Payload:
    """Their bytes, one after the other, in the CPU's memory."""
    return np.concatenate([part.contiguous().cpu().view(-1).numpy().view(np.uint8) for part in parts])


def read(payload: memoryview, dtype: Any, begin: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` entries of a NumPy dtype from byte `begin` on. Raises BadInput where they are not there."""
    if begin + count * np.dtype(dtype).itemsize > len(payload):
        raise BadInput(f"{len(payload)} bytes are too short for {count} entries of {np.dtype(dtype).name}")
    return torch.from_numpy(np.frombuffer(payload, dtype, count, begin).copy()).to(device)


def expect_bytes(payload: memoryview, expected: int) -> None:
    """Raises BadInput."""
    if len(payload) != expected:
        raise BadInput(f"it has {len(payload)} bytes of compressed entries, and {expected} were expected")
