"""The plan's factor on an optimizer's learning rates."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch


class LearningRate:
    """There only while optimizer.step() runs: the script, its schedulers and checkpoints see what the script set."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []  # group, its own rate, the one in its place
        self._hook = optimizer.register_step_post_hook(self._after_step)
        # Before every other's: a scheduler that steps in such a hook must not go on from the scaled rate.
        hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
        hooks.move_to_end(self._hook.id, last=False)

    def multiply(self, factor: float) -> None:
        """Every group's rate, a number or a tensor, until `restore` or the end of the step. A group may have none."""
        self.restore()  # of a step that raised
        if factor == 1:
            return
        for group in self._optimizer.param_groups:
            if "lr" in group:
                own = group["lr"]
                group["lr"] = scaled = own * factor
                self._scaled.append((group, own, scaled))

    def restore(self) -> None:
        """Put back the very objects that were there, but where somebody set another rate since."""
        for group, own, scaled in self._scaled:
            if group["lr"] is scaled:
                group["lr"] = own
        self._scaled.clear()

    def close(self) -> None:
        self._hook.remove()

    def _after_step(self, *_: object) -> None:
        self.restore()
