"""Fuses gradients into pieces that are all-reduced as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

MIB: Final = 1024 * 1024
# The gradients that come first leave first: a small piece starts the network early. The rest are large enough for a
# thin link's bandwidth. Both as DDP does, so that comparisons compare the same thing.
FIRST_PIECE_BYTES: Final = 1 * MIB
PIECE_BYTES: Final = 25 * MIB


def fused_by_bytes(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """As `TensorReducer.fuse`: by bytes, in the order in which the pieces fill up during a backward pass."""
    done: list[list[int]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    bytes_in: dict[tuple[torch.device, torch.dtype], int] = {}
    for index, parameter in enumerate(parameters):
        kind = (parameter.device, parameter.dtype)
        filling.setdefault(kind, []).append(index)
        bytes_in[kind] = bytes_in.get(kind, 0) + parameter.numel() * parameter.element_size()
        if bytes_in[kind] >= (PIECE_BYTES if done else FIRST_PIECE_BYTES):
            done.append(filling.pop(kind))
            bytes_in[kind] = 0
    return [*done, *sorted(filling.values(), key=lambda piece: piece[-1])]
