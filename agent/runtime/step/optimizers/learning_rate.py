"""The plan's factor on an optimizer's learning rates."""

from __future__ import annotations

from typing import Any

import torch


class LearningRate:
    """Factor that holds while optimizer.step() runs. The script, its schedulers and checkpoints see their own rates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []  # group, its own rate, the one in its place

    def multiply(self, factor: float) -> None:
        """Multiply every group's rate, a number or a tensor, until `restore`. A group may have none."""
        self.restore()  # of a step that raised
        if factor == 1:
            return
        for group in self._optimizer.param_groups:
            if "lr" in group:
                own = group["lr"]
                group["lr"] = scaled = own * factor
                self._scaled.append((group, own, scaled))

    def restore(self) -> None:
        """Put back the very objects that were there, unless the script has set another rate since."""
        for group, own, scaled in self._scaled:
            if group["lr"] is scaled:
                group["lr"] = own
        self._scaled.clear()
