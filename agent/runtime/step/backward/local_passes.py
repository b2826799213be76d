"""Backward passes whose gradients stay with their rank, until those of a later pass leave: `run.no_sync`.

Between two exchanges p.grad is this rank's part, the sum over passes of weight * gradient, so that the sum over ranks
is the gradient of all batches together, whatever their shares were. What an earlier exchange left in p.grad is the same
on every rank, and a rank's part of that is weight * p.grad, for weights sum to 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from atoll.agent.runtime.model.prepared_parameters import unfrozen
from atoll.agent.runtime.step.backward.gradient_passes import scale_into
from atoll.agent.runtime.strategy_interface.capabilities import Pass


class LocalPasses:
    """`expect` before the first one, then `begin` for every pass, local or not."""

    def __init__(self, parameters: Sequence[nn.Parameter], opens: Callable[[], None]) -> None:
        """opens: called when a gradient is on its way, in case that nobody has begun the pass."""
        self._parameters, self._opens = parameters, opens
        self.parts = False
        """p.grad is this rank's part, of this pass or one before it."""
        self._weight = 1.0  # of the gradients on their way into p.grad
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def expect(self) -> None:
        """A local pass may follow. Until this is called, no gradient has one hook more."""
        if not self._hooks:
            with unfrozen(self._parameters):  # one that is frozen now may train later
                self._hooks = [one.register_hook(self._weighed) for one in self._parameters]  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def begin(self, opened: Pass) -> float:
        """Returns the weight that p.grad still has to be given after this pass; 1 where gradients have it already."""
        weight = opened.batch.weight
        if not (opened.local or self.parts):
            self._weight = 1.0
            return weight
        if not self.parts:
            for parameter in self._parameters:
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    scale_into(parameter.grad, parameter.grad, weight)
                elif parameter.grad is not None:
                    parameter.grad = parameter.grad * weight
        self.parts, self._weight = opened.local, weight
        return 1.0

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _weighed(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Weigh a gradient before it is accumulated."""
        self._opens()
        if self._weight == 1.0:
            return None
        return gradient * self._weight if self._weight > 0 else torch.zeros_like(gradient)  # 0 * NaN would be NaN
