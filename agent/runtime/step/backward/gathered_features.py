"""Rows of all ranks as one tensor, through which gradients flow back to the ranks that they came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SumOfGradients = Callable[[torch.Tensor], torch.Tensor]


class GatheredFeatures(torch.autograd.Function):
    """[own, ...] in, [all, ...] out. Backward: each rank's part of the sum over ranks."""

    @staticmethod
    def forward(
        context: Any, own: torch.Tensor, everyone: torch.Tensor, first: int, summed: SumOfGradients
    ) -> torch.Tensor:
        """everyone: the value. first: where this rank's own rows begin in it. summed: brings the gradients together."""
        context.rows, context.first, context.summed = len(own), first, summed
        return everyone

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        whole = context.summed(gradient)
        return whole[context.first : context.first + context.rows].to(gradient.dtype), None, None, None
