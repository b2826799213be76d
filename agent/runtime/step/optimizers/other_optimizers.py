"""Refuses the updates of optimizers that run.prepare was not given."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from atoll.errors import BadInput


class OtherOptimizers:
    """While this is there, the model's parameters are moved by prepared optimizers alone, or inside their step, as
    wrappers do. Ranks would not move them alike, and no checkpoint had the moments."""

    def __init__(self, model: nn.Module, prepared: Collection[torch.optim.Optimizer]) -> None:
        self._prepared = {id(optimizer) for optimizer in prepared}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._hook = register_optimizer_step_pre_hook(self._before)

    def close(self) -> None:
        self._hook.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._prepared:
            return
        moved = (id(one) for group in optimizer.param_groups for one in group["params"])
        name = next((self._names[one] for one in moved if one in self._names), None)
        if name is not None and not self._inside():
            raise BadInput(
                f"a {type(optimizer).__name__} that run.prepare was not given is about to move parameter {name}: "
                "its moments would be in no checkpoint. Give it to run.prepare, and use what that returned"
            )

    def _inside(self) -> bool:
        """Whether a prepared one's step() calls, as the stack has it: a step that raises calls no hook at its end."""
        frame = inspect.currentframe()
        while frame is not None:
            if id(frame.f_locals.get("self")) in self._prepared:
                return True
            frame = frame.f_back
        return False
