"""Updates that move nothing, in place of those of a step that does not count yet or no more."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from atoll.agent.runtime.model.snapshot import Tracked


def why_not_undoable(optimizers: Sequence[torch.optim.Optimizer], tracked: Mapping[str, Tracked]) -> str | None:
    """Return why a step could not be put back; None if it can."""
    known = [getattr(one, "optimizer", None) for one in tracked.values()]
    for optimizer in optimizers:
        scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if scheduled and not any(one is optimizer for one in known):
            return (
                f"a learning-rate scheduler of the {type(optimizer).__name__} is not known to the run, so its steps "
                "could not be undone. Give it to run.prepare(..., scheduler=...)"
            )
    return None


def hollow_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer without parameters, state and hooks: its step() only calls the closure."""
    hollow = object.__new__(type(optimizer))
    vars(hollow).update(vars(optimizer))
    hooks: dict[str, Any] = {
        name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    }
    vars(hollow).update(hooks, param_groups=[], state=defaultdict(dict))
    return hollow


def schedulers_of(
    optimizers: Sequence[torch.optim.Optimizer], known: Iterable[Tracked]
) -> list[torch.optim.lr_scheduler.LRScheduler]:
    """Return the schedulers of these optimizers that are not among the known ones.

    No optimizer knows its schedulers, so all living objects are looked through, which takes about 50 ms."""
    ours, seen = {id(one) for one in optimizers}, {id(one) for one in known}
    alive = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.lr_scheduler.LRScheduler)]
    return [one for one in alive if id(one) not in seen and id(getattr(one, "optimizer", None)) in ours]
