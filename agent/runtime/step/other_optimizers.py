"""Refuses the updates of optimizers that run.prepare was not given."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from atoll.errors import BadInput


class OtherOptimizers:
    """While this is there, the model's parameters are moved by prepared optimizers alone, or inside their step, as
    wrappers do. Ranks would not move them alike, and no checkpoint had the moments."""

    def __init__(self, model: nn.Module, prepared: Collection[torch.optim.Optimizer]) -> None:
        self._prepared = {id(optimizer) for optimizer in prepared}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._inside = False  # a prepared one's step()
        self._hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._prepared:
            self._inside = True
        elif not self._inside:
            moved = (id(one) for group in optimizer.param_groups for one in group["params"])
            if (name := next((self._names[one] for one in moved if one in self._names), None)) is not None:
                raise BadInput(
                    f"a {type(optimizer).__name__} that run.prepare was not given is about to move parameter {name}: "
                    "its moments would be in no checkpoint. Give it to run.prepare, and use what that returned"
                )

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._prepared:
            self._inside = False
