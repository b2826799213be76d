"""Finds gradients that one of several optimizers carries over a boundary at which checkpoints are taken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from atoll.errors import BadInput


class UnappliedGradients:
    """An update is whole when some optimizer has stepped after the last backward pass. Another's gradients may lie in
    p.grad then: a GAN's generator leaves some to the discriminator, which clears them before its own pass. To go on
    accumulating on them is refused, for a run that goes on from there would not have them."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._came: set[int] = set()  # id(parameter) with gradients that no optimizer has applied yet
        self._carried: set[int] = set()  # of them, those from before the last whole update
        self._whole: frozenset[int] = frozenset()  # that had come when it was
        self._accumulated: dict[int, str] = {}  # of those again, the names of which got more on top
        self.watches = len(optimizers) > 1
        """One optimizer alone carries nothing."""
        named = model.named_parameters() if self.watches else ()
        trained = [(name, one) for name, one in named if one.requires_grad]
        self._hooks = [one.register_hook(partial(self._on_gradient, name, one)) for name, one in trained]  # type: ignore[no-untyped-call]

    def whole(self) -> None:
        """Note that the update is whole, at a boundary: a checkpoint may be taken."""
        self._carried, self._whole = set(self._came), frozenset(self._came)

    def go_back(self) -> None:
        """Return to the last whole update."""
        self._came, self._carried = set(self._whole), set(self._whole)
        self._accumulated.clear()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise BadInput if a part of the gradients was carried. Call it as the optimizer's step() begins."""
        if not self._accumulated:
            return
        for group in optimizer.param_groups:
            name = next((self._accumulated[id(one)] for one in group["params"] if id(one) in self._accumulated), None)
            if name is not None:
                raise BadInput(
                    f"{type(optimizer).__name__} accumulated gradients of parameter {name} over a batch at whose end "
                    "another optimizer's update was whole: a run that goes on from there would not have them. Let all "
                    "optimizers step at the same batches, or call zero_grad() before this one's backward pass"
                )

    def applied(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer's step() is done."""
        if self._came:
            owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
            self._came -= owned
            self._carried -= owned

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, name: str, parameter: nn.Parameter, _: torch.Tensor) -> Any:
        """Note a gradient before it is accumulated."""
        if id(parameter) in self._carried:
            self._carried.discard(id(parameter))
            if parameter.grad is not None and parameter.grad.any():
                self._accumulated[id(parameter)] = name
        elif id(parameter) in self._accumulated and (parameter.grad is None or not parameter.grad.any()):
            del self._accumulated[id(parameter)]  # it was cleared since
        self._came.add(id(parameter))
