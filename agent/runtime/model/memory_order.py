"""Order of a tensor's entries in memory: flat views of tensors, and tensors laid out as a parameter.

Fused optimizers walk through parameter, gradient and moments side by side in memory, so all of them need the
parameter's strides. torch.autograd calls that the gradient layout contract."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return all entries in the order of memory, without a copy; None if there are gaps or overlaps between them."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    strided = sorted(((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1))
    expected = 1
    for stride, size in strided:
        if stride != expected:
            return None
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def laid_out_as(flat_N: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of `flat_N`, contiguous, with the parameter's shape and strides.

    A parameter with gaps or overlaps gets contiguous strides, as its gradient does from torch."""
    if flat_view(parameter) is None:
        return flat_N.view(parameter.shape)
    return flat_N.as_strided(parameter.shape, parameter.stride())


def memory_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's dimensions, the slowest in memory first."""
    if parameter.is_contiguous() or flat_view(parameter) is None:
        return tuple(parameter.shape)
    order = sorted(range(parameter.dim()), key=parameter.stride().__getitem__, reverse=True)
    return tuple(parameter.shape[dim] for dim in order)


@torch.no_grad()
def restore_strides(parameter: torch.Tensor, kept: MutableMapping[str, Any]) -> None:
    """Give each tensor of an optimizer's state for this parameter the parameter's strides; `kept` changes in place."""
    if parameter.is_contiguous() or flat_view(parameter) is None:
        return
    for name, value in kept.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.shape == parameter.shape:
            kept[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
