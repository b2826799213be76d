"""Interface of algorithms that compress gradients. N entries.

The input is value + residual. The part that the payload does not represent becomes the residual, so nothing is lost
(error feedback). Tensors are float32, flat, on any one device; payloads are bytes, little-endian. A rank checks what it
received before it uses it: decompress raises BadInput for an impossible payload."""

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
    """Place of a compression in the run, the same on all ranks. tensors: shapes, in the order of the entries; empty if
    it is a part of a group. density: of this step."""

    round: int
    first: int  # entry of the model, of the first one here
    tensors: tuple[tuple[int, ...], ...] = ()
    density: float = 1.0


class Compressor(Protocol):
    """A compression algorithm."""

    divisible: bool
    """True if any range of entries can be compressed by itself."""

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        """Compress value + residual. value_N: read, finite. residual_N: in place, the part that is left out."""

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        """Add the values of a payload to out_N. The same bits on every rank. Raises BadInput; out_N is undefined
        then."""

    def ratio(self, place: CodePlace, entries: int) -> float:
        """Return about how many bytes of payload a byte of gradient takes."""


def as_payload(*parts: torch.Tensor) -> Payload:
    """Return the tensors' bytes, one after the other, in the CPU's memory."""
    return np.concatenate([part.contiguous().cpu().view(-1).numpy().view(np.uint8) for part in parts])


def read(payload: memoryview, dtype: Any, begin: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` entries of a NumPy dtype from byte `begin` on. Raises BadInput if the payload is shorter."""
    if begin + count * np.dtype(dtype).itemsize > len(payload):
        raise BadInput(f"{len(payload)} bytes are too short for {count} entries of {np.dtype(dtype).name}")
    return torch.from_numpy(np.frombuffer(payload, dtype, count, begin).copy()).to(device)


def expect_bytes(payload: memoryview, expected: int) -> None:
    """Check the payload's length. Raises BadInput."""
    if len(payload) != expected:
        raise BadInput(f"it has {len(payload)} bytes of compressed entries, and {expected} were expected")
