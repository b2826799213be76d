"""Puts a `transformers.Trainer` on Atoll's data plane: `run = join()` at the script's start, `attach(run, trainer)`
before `trainer.train()`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from atoll.adapters import accelerate
from atoll.adapters.environment import report
from atoll.agent.runtime.api.run import Run
from atoll.agent.runtime.data.loader import Loader
from atoll.errors import BadInput


def join(**options: Any) -> Run:
    """Join as atoll.init(**options); call it before TrainingArguments are made. Raises BadInput."""
    # It sees a process group that it has no part in, and would send the user to a launcher.
    logging.getLogger("transformers.training_args").addFilter(lambda line: "parallel_mode" not in line.getMessage())
    return accelerate.join(**options)


def attach(run: Run, trainer: Trainer) -> None:
    """Let `trainer.train()` train this worker's share of each batch, and resume from Atoll's checkpoints.

    `per_device_train_batch_size` counts as the whole job's batch. The conditions of `run.prepare` on model,
    optimizer and dataset hold here. Raises BadInput for arguments that would mean something else."""
    args = trainer.args
    if args.gradient_accumulation_steps > 1:
        raise BadInput(
            "the adapter does not take gradient_accumulation_steps above 1, for the Trainer then draws batches before "
            "the steps that they belong to. Raise per_device_train_batch_size, which is split over the workers"
        )
    if args.n_gpu > 1:
        raise BadInput(
            f"the Trainer would use {args.n_gpu} GPUs in this process, because CUDA was used before the run was "
            "joined. Call join() first; outside of Atoll's agents set CUDA_VISIBLE_DEVICES to one GPU"
        )
    mixed = "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    accelerate.refuse_what_it_cannot_do(run, args.distributed_state, mixed)
    accelerate.show_rank(run, args.distributed_state)
    model, optimizer = trainer.model, trainer.create_optimizer()
    assert isinstance(model, nn.Module)
    _, _, loader = run.prepare(model, optimizer, trainer.get_train_dataloader())
    trainer.evaluation_loop = _evaluated(run, trainer.evaluation_loop)
    trainer._save_checkpoint = _evaluated(run, trainer._save_checkpoint)
    epochs = TrainerEpochs(run, trainer, loader)
    trainer.get_train_dataloader = lambda: epochs
    trainer.add_callback(epochs)


def _evaluated(run: Run, looks: Callable[..., Any]) -> Callable[..., Any]:
    """Let the Trainer's method, which all workers call, look at the model that they share."""

    @functools.wraps(looks)
    def call(*args: Any, **kwargs: Any) -> Any:
        with run.evaluation():
            return looks(*args, **kwargs)

    return call


class TrainerEpochs(TrainerCallback):  # type: ignore[misc]
    """The Trainer's loader, and what keeps its epochs level with the run's.

    The Trainer counts epochs from 0. Those that the run has behind it pass without a batch; the one that it goes on in
    is shorter."""

    def __init__(self, run: Run, trainer: Trainer, loader: Loader[Any]) -> None:
        self._run, self._trainer, self._loader = run, trainer, loader
        self._epochs: Iterator[int] = iter(())
        self._pass: Iterator[Any] = iter(())
        self._due = -1  # the epoch that the run is in
        self._epoch = -1  # the Trainer's
        self.dataset = loader.samples  # the Trainer asks for its length

    def __len__(self) -> int:
        """Batches of a whole epoch, of which schedules are made. Raises TypeError for a stream."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._pass = iter(self._loader) if self._epoch == self._due else iter(())
        return self._pass

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if (scheduler := kwargs.get("lr_scheduler")) is not None:
            self._run.track("scheduler", scheduler)
        # What was trained before this process counts; it logged none of it.
        state.global_step = self._run.step  # an epoch's last batch that is shown again is behind it
        self._trainer._globalstep_last_logged = self._trainer._initial_global_step = state.global_step
        self._epochs = self._run.epochs(state.num_train_epochs)
        self._next()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._epoch += 1
        if self._epoch > self._due:
            self._next()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if (batch := self._loader.current) is None:
            return
        if batch.step + 1 < state.global_step:  # an epoch's last batch may be shown again after a resume
            control.should_log = control.should_evaluate = control.should_save = False
        state.global_step = batch.step + 1

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._epoch < self._due:  # it takes an epoch without a batch for the end
            control.should_training_stop = control.should_evaluate = control.should_save = control.should_log = False
        elif self._run.last_batch:
            next(self._pass, None)  # the Trainer counts and does not ask for the end, where a step boundary is
        elif self._loader.batches_left and not control.should_training_stop and state.global_step < state.max_steps:
            raise BadInput(
                "the Trainer ends its epoch after as many batches as it would have itself, and a plan made them "
                "smaller. Let [adapt] batch begin at per_device_train_batch_size"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        report(self._run, numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Waits for the last checkpoint, also where the Trainer stopped in the middle of an epoch."""
        self._loader.begin_epoch(self._run.epoch)  # the batch that was handed out last counts
        if self._epoch + 1 < state.num_train_epochs:
            self._run.end_training()
        self._next()

    def _next(self) -> None:
        self._due = next(self._epochs, self._due)
