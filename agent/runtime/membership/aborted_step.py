"""The broken step: what the script does between a backward pass that lost a peer and the next view counts for nothing.

The script notices nothing of it. Its optimizers step over no parameters, and what else moved is put back as it was at
the boundary before. Where it accumulates gradients, the passes that follow up to its next update are for show, too: all
that were to make up that update are trained again, and the script's own count of them stays in step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.snapshot import Snapshot, Tracked

LONGEST_PASSES: Final = 4096
"""For show. A script that makes no update in so many makes none."""


class AbortedStep:
    """Of one loss, from the pass that broke until `put_back`. Used by the training thread alone."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], snapshot: Snapshot, *, whole: bool
    ) -> None:
        """snapshot: of the boundary that this goes back to. whole: no optimizer has stepped since."""
        self._snapshot = snapshot
        self._hollow = {id(one): _hollow(one) for one in optimizers}
        self._whole = whole
        self._parameters = [one for one in model.parameters() if not snapshot.keeps(one)]
        self._versions = [one._version for one in self._parameters]
        self.passes = 0  # batches handed out for show
        self.updated = False
        """The script made its update: the next boundary is one as that before the first broken pass."""
        snapshot.hold()

    def in_place_of(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What its step() is called with instead."""
        return (self._hollow[id(optimizer)], *args[1:]), kwargs

    @property
    def whole(self) -> bool:
        """Whether the parameters are those of the boundary: nobody moved them in another way either."""
        return self._whole and all(
            one._version == version for one, version in zip(self._parameters, self._versions, strict=True)
        )

    def put_back(self) -> None:
        """What is not a parameter or a moment, as it was at the boundary."""
        self._snapshot.put_back()


def why_not(optimizers: Sequence[torch.optim.Optimizer], tracked: Mapping[str, Tracked]) -> str | None:
    """Why what the script does in a broken step could not be put back; None where it can."""
    known = [getattr(one, "optimizer", None) for one in tracked.values()]
    for optimizer in optimizers:
        scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if scheduled and not any(one is optimizer for one in known):
            return (
                f"a learning-rate scheduler of the {type(optimizer).__name__} is not known to the run, so its steps "
                "could not be undone. Give it to run.prepare(..., scheduler=...)"
            )
    return None


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


def _hollow(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same without parameters, state and hooks: its step() does nothing but call the closure."""
    hollow = object.__new__(type(optimizer))
    vars(hollow).update(vars(optimizer))
    hooks: dict[str, Any] = {
        name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    }
    vars(hollow).update(hooks, param_groups=[], state=defaultdict(dict))
    return hollow
