"""Rounding of tensors on their way to another worker: none, or into a coarser form for thin links.

An entry of `bfloat16` is off by at most 2^-8 of its own size; one of `int8` by half of its block's scale, which is the
block's largest magnitude / 127. So of a block of K entries the rounding is at most sqrt(K) / 254 of its size, 3.2 %
here, whatever it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import torch
from torch import nn

from atoll.errors import BadInput

Form: TypeAlias = Literal["float32", "bfloat16", "int8"]
FORMS: Final[tuple[Form, ...]] = ("float32", "bfloat16", "int8")
"""From the finest to the coarsest."""
BLOCK: Final = 64
"""Entries of an `int8` with a scale of their own, K."""
SMALL: Final = 1024
"""Tensors of fewer entries stay as they are."""
_MOST: Final = 127


def bytes_per_entry(form: Form) -> float:
    return {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 4.0 / BLOCK}[form]


def coarse(tensor: torch.Tensor, form: Form) -> list[torch.Tensor]:
    """Return the tensors that are sent for one.

    That is itself if it is small or not float32; bfloat16 of its shape; or int8 [N] and float32 [B]."""
    if not is_coarsened(form, tensor.numel(), tensor.dtype):
        return [tensor]
    if form == "bfloat16":
        return [tensor.bfloat16()]
    block_BK = _blocks(tensor.reshape(-1))
    scale_B = block_BK.abs().amax(dim=1) / _MOST
    times_BK = torch.where(scale_B.unsqueeze(1) > 0, block_BK / scale_B.unsqueeze(1), 0.0).round_()
    return [times_BK.clamp_(-_MOST, _MOST).to(torch.int8).reshape(-1)[: tensor.numel()], scale_B]


def fine(
    sent: Sequence[torch.Tensor], wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], form: Form
) -> list[torch.Tensor]:
    """Restore the tensors that `coarse` was given. Raises BadInput for anything else.

    wanted: their shapes and dtypes, in order."""
    left, found = deque(sent), []
    for shape, dtype in wanted:
        entries = torch.Size(shape).numel()
        pieces = 2 if form == "int8" and is_coarsened(form, entries, dtype) else 1
        if len(left) < pieces:
            raise BadInput(f"{len(sent)} tensors are too few for {len(wanted)} as {form}")
        first = left.popleft()
        if pieces == 2:
            first = _from_int8(first, left.popleft(), entries).reshape(shape)
        elif is_coarsened(form, entries, dtype):
            if first.dtype != torch.bfloat16:
                raise BadInput(f"a tensor of {first.dtype} came for one of bfloat16")
            first = first.float()
        found.append(first)
    if left:
        raise BadInput(f"{len(sent)} tensors are too many for {len(wanted)} as {form}")
    return found


def is_coarsened(form: Form, entries: int, dtype: torch.dtype) -> bool:
    """Return True if a tensor is sent in another form."""
    return form != "float32" and dtype == torch.float32 and entries >= SMALL


def _from_int8(times_N: torch.Tensor, scale_B: torch.Tensor, entries: int) -> torch.Tensor:
    if times_N.dtype != torch.int8 or scale_B.dtype != torch.float32 or times_N.shape != (entries,):
        raise BadInput(f"tensors of {times_N.dtype} and {scale_B.dtype} came for {entries} entries as int8")
    if scale_B.shape != (-(-entries // BLOCK),):
        raise BadInput(f"{tuple(scale_B.shape)} scales came for {entries} entries as int8")
    return (_blocks(times_N.float()) * scale_B.unsqueeze(1)).view(-1)[:entries]


def _blocks(entry_N: torch.Tensor) -> torch.Tensor:
    """[B, K]: zeros behind the last."""
    return nn.functional.pad(entry_N, (0, -len(entry_N) % BLOCK)).view(-1, BLOCK)
