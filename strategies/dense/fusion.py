"""Fuses gradients into pieces that are all-reduced as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atoll.strategies.dense.pieces import FIRST_PIECE_BYTES, PIECE_BYTES


def fused_by_bytes(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Group parameters by bytes, in the order in which a backward pass fills the pieces; for `TensorReducer.fuse`."""
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
