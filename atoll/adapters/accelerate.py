"""Puts a loop of Accelerate's on Atoll's data plane.

`run = join()` at the script's start, `prepare(run, accelerator, ...)` in place of `accelerator.prepare(...)`,
`run.epochs(n)` in place of `range(n)`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, PartialState
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from atoll.adapters.environment import joined_alone
from atoll.agent.runtime.api.run import Run
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.model.snapshot import Tracked
from atoll.errors import BadInput


def join(**options: Any) -> Run:
    """Join as atoll.init(**options), before any object of Accelerate or transformers is made. Raises BadInput if one
    exists."""
    if PartialState._shared_state:
        raise BadInput(
            "Accelerate has looked at its environment already. Join the run first, before Accelerator(), "
            "TrainingArguments(...) or whatever else makes one"
        )
    return joined_alone(**options)


def show_rank(run: Run, state: PartialState) -> None:
    """Let only rank 0 write, print and log, although each framework sees one process."""
    state.process_index, state.local_process_index = run.rank, run.local_rank


def refuse_what_it_cannot_do(run: Run, state: PartialState, mixed_precision: str) -> None:
    """Raises BadInput for what would train something else than it says."""
    if state.num_processes > 1:
        raise BadInput(
            f"Accelerate has {state.num_processes} processes of its own; the adapter needs one in each worker"
        )
    if mixed_precision == "fp16":
        raise BadInput("the adapter does not take fp16, whose scaler's state is Accelerate's own. Use bf16")
    if run.device.type != state.device.type:
        raise BadInput(f"Accelerate trains on {state.device} and Atoll on {run.device}; let both see the same devices")


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
