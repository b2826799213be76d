"""Puts a loop of Accelerate's on Atoll's data plane.

`run = join()` at the script's start, `prepare(run, accelerator, ...)` in place of `accelerator.prepare(...)`,
`run.epochs(n)` in place of `range(n)`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, PartialState
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from atoll.adapters.alone import joined, refuse_what_it_cannot_do, show_rank
from atoll.agent.runtime.api.run import Run
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.model.snapshot import Tracked
from atoll.errors import BadInput


def join(**options: Any) -> Run:
    """Join as atoll.init(**options); call it before Accelerator() is made. Raises BadInput."""
    return joined(**options)


def prepare(  # noqa: PLR0917 - in the order of `run.prepare`
    run: Run,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    scheduler: Tracked | None = None,
) -> tuple[nn.Module, Optimizer, Loader[Any]]:
    """Model and optimizer as Accelerate wraps them for one process, and Atoll's loader of this worker's share.

    loader: its batch size counts as the whole job's. scheduler: as in `run.prepare`; it steps with the optimizer that
    comes back. Raises BadInput."""
    if accelerator.gradient_accumulation_steps > 1:
        raise BadInput("the adapter does not take gradient_accumulation_steps above 1: accumulate with run.no_sync()")
    state = PartialState()  # all of them are one
    refuse_what_it_cannot_do(run, state, accelerator.mixed_precision)
    show_rank(run, state)
    _, _, share = run.prepare(model, optimizer, loader, scheduler=scheduler)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, share
