"""Ignores a step that lost a peer: what the script does from there to the next view has no effect.

The script does not notice. Its optimizers step over no parameters, and other state returns to its value at the boundary
before. A script that accumulates gradients makes the passes up to its next update without effect, too. All passes of
that update are trained again, and the script's own count of them stays right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.step.optimizers.hollow_steps import hollow_optimizer

MAX_IGNORED_PASSES: Final = 4096
"""Passes without effect before an update. A script that makes no update in so many makes none."""


class AbortedStep:
    """The step of one loss, from the aborted pass until `put_back`. Used by the training thread alone."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], snapshot: Snapshot, *, whole: bool
    ) -> None:
        """snapshot: of the boundary before the step. whole: no optimizer has stepped since."""
        self._snapshot = snapshot
        self._hollow = {id(one): hollow_optimizer(one) for one in optimizers}
        self._whole = whole
        self._parameters = [one for one in model.parameters() if not snapshot.keeps(one)]
        self._versions = [one._version for one in self._parameters]
        self.passes = 0  # batches handed out without effect
        self.updated = False
        """The script made its update, so the next boundary is like the one before the first aborted pass."""
        snapshot.hold()

    def in_place_of(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with which the optimizer's step() moves nothing."""
        return (self._hollow[id(optimizer)], *args[1:]), kwargs

    @property
    def whole(self) -> bool:
        """True if the parameters are those of the boundary. The script may have written some without an optimizer."""
        return self._whole and all(
            one._version == version for one, version in zip(self._parameters, self._versions, strict=True)
        )

    def put_back(self) -> None:
        """Give what is neither parameter nor moment its value at the boundary."""
        self._snapshot.put_back()


def without_gradients(
    optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, when: Callable[[], bool]
) -> tuple[Any, Any] | None:
    """Wrap the closure of an optimizer's step: if a peer is lost in it, the step finds no gradient and moves nothing.

    when: called after the closure; True if a peer was lost. Returns the step's arguments, or None without a closure."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def wrapped() -> Any:
        loss = closure()
        if when():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        return loss

    return (args[0], wrapped, *args[2:]), {name: one for name, one in kwargs.items() if name != "closure"}
