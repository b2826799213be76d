"""Delayed parameter updates: a step's gradient is applied one step later, so that nobody waits for its average.

Ren et al., ZeRO-Offload, 2021, section 5.2, as the volunteer pipelines use it: servers hold weights and optimizer
state, who computes holds neither."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class DelayedUpdate:
    """Of one stage. Sums are float32 on the CPU, one entry for each parameter's, P in all."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = tuple(parameters), optimizer
        self._sum_P = torch.zeros(sum(one.numel() for one in self._parameters))
        self._samples = 0
        self._due_P: torch.Tensor | None = None  # the mean of the step before

    @property
    def samples(self) -> int:
        """Whose gradients are in this step's sum."""
        return self._samples

    @property
    def size(self) -> int:
        return self._sum_P.numel()

    def add(self, gradient_P: torch.Tensor, samples: int) -> None:
        """gradient_P: the sum over `samples`."""
        self._sum_P += gradient_P
        self._samples += samples

    def discard(self) -> None:
        """All of this step's; that of the step before is still to come."""
        self._sum_P.zero_()
        self._samples = 0

    def end_step(self) -> None:
        """Applies the mean of the step before; this step's is the next. One without samples changes nothing later."""
        due_P, self._due_P = self._due_P, self._sum_P / self._samples if self._samples else None
        self.discard()
        if due_P is not None:
            self._apply(due_P)

    def flush(self) -> None:
        """At the very end: applies what is still to come."""
        if self._due_P is not None:
            self._apply(self._due_P)
            self._due_P = None

    def weights(self) -> torch.Tensor:
        """[P], as volunteers have them."""
        return torch.cat([one.detach().reshape(-1).float() for one in self._parameters])

    def _apply(self, mean_P: torch.Tensor) -> None:
        pieces = torch.split(mean_P, [one.numel() for one in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.reshape(parameter.shape).to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
