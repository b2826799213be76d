"""Lets Accelerate, and what builds on it, see a process alone: gradients, samples and checkpoints are Atoll's."""

from __future__ import annotations

from typing import Any

from accelerate import PartialState

from atoll.adapters.environment import joined_alone
from atoll.agent.runtime.api.run import Run
from atoll.errors import BadInput


def joined(**options: Any) -> Run:
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
