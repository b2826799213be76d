"""Lets Lightning's Trainer train on Atoll's data plane: `run = join()` at the script's start, and
`Trainer(strategy=AtollStrategy(run), ...)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from atoll.adapters.environment import joined_alone, report
from atoll.agent.runtime.api.run import Run
from atoll.agent.runtime.data.loader import Loader
from atoll.errors import BadInput

# One code under two names, whose classes are no relatives: the one that the script uses, or that is there.
_USED = "lightning.pytorch" in sys.modules or find_spec("pytorch_lightning") is None
_NAME: Final = "lightning.pytorch" if _USED else "pytorch_lightning"
SingleDeviceStrategy: Any = import_module(f"{_NAME}.strategies").SingleDeviceStrategy
Callback: Any = import_module(f"{_NAME}.callbacks").Callback
Checkpoint: Any = import_module(f"{_NAME}.callbacks").Checkpoint
rank_zero_only: Any = import_module(f"{_NAME}.utilities").rank_zero_only


def join(**options: Any) -> Run:
    """Join as atoll.init(**options); call it before the Trainer is made. Raises BadInput."""
    return joined_alone(**options)


class AtollStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Each worker is a process alone to the Trainer; gradients, samples and what a run goes on from are Atoll's.

    The batch size of the training loader counts as the whole job's. What `run.prepare` asks of model, optimizers and
    dataset holds here. Raises BadInput where a setting of the Trainer would mean something else."""

    def __init__(self, run: Run, **options: Any) -> None:
        """options: as SingleDeviceStrategy's."""
        super().__init__(device=run.device, **options)
        self._run = run
        self._epochs: RunEpochs | None = None
        self._evaluation = ExitStack()
        self._show_rank()

    def _show_rank(self) -> None:
        """Let only rank 0 write, print and log; another worker may become rank 0."""
        rank_zero_only.rank = self.global_rank = self._run.rank
        self.local_rank = self._run.local_rank

    @property
    def is_global_zero(self) -> bool:
        return self._run.is_main

    def process_dataloader(self, dataloader: object) -> object:
        """Return the iterable for the Trainer: for a training loader the rest of each epoch of the run."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if self._epochs is not None:
            raise BadInput("the adapter takes one training loader, made once; let a dataset combine several")
        if not isinstance(dataloader, DataLoader):
            raise BadInput(f"the training loader is a {type(dataloader).__name__}; the adapter takes a DataLoader")
        self._epochs = RunEpochs(self._run, trainer, dataloader)
        trainer.callbacks.append(self._epochs)
        return self._epochs

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self._epochs is not None
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self._epochs.begin(self.lightning_module, self.optimizers, schedulers)

    def on_train_end(self) -> None:
        super().on_train_end()
        assert self._epochs is not None
        self._epochs.end()

    def on_validation_start(self) -> None:
        """All workers validate the model that they share."""
        super().on_validation_start()
        if not self.lightning_module.trainer.sanity_checking:  # before the run is prepared
            self._evaluation.enter_context(self._run.evaluation())

    def on_validation_end(self) -> None:
        self._evaluation.close()
        super().on_validation_end()

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        more = module.automatic_optimization and module.trainer.fit_loop.epoch_loop._should_accumulate()
        with self._run.no_sync() if more else nullcontext():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Forward and backward pass first, as with a GradScaler: what Atoll agrees on comes after them."""
        loss = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return loss

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return one decision for all workers, e.g. whether to stop early: devices of different kinds round
        differently."""
        (votes,) = self._run.sum(float(decision))
        return votes == self._run.world_size if all else votes > 0


class RunEpochs(Callback):  # type: ignore[misc]
    """The Trainer's loader, and what keeps its counts level with the run's."""

    def __init__(self, run: Run, trainer: Any, given: DataLoader[Any]) -> None:
        """Raises BadInput for what the Trainer would do otherwise than it says."""
        self._run, self._trainer, self._given = run, trainer, given
        self._loader: Loader[Any]
        self._epochs: Iterator[int] = iter(())
        self._pass: Iterator[Any] = iter(())
        self._epoch, self._total = -1, 0
        self._begun = False  # the Trainer has asked for a batch of this epoch
        self._behind = 0  # steps of earlier processes
        self._check()  # before Lightning asks for a batch: of what has no length it does so before training starts

    def __len__(self) -> int:
        """Batches of a whole epoch, as schedules count them. Raises TypeError for a stream."""
        return len(self._given)

    def begin(self, module: torch.nn.Module, optimizers: list[Any], schedulers: list[Any]) -> None:
        """Joins what was trained before. Raises BadInput."""
        run, trainer = self._run, self._trainer
        _, _, self._loader = run.prepare(module, optimizers, self._given, scheduler=schedulers)
        run.track("lightning", _TrainerState(trainer))
        fit, steps = trainer.fit_loop, trainer.max_steps * trainer.accumulate_grad_batches
        if fit.max_epochs == -1:
            fit.max_epochs = ceil(steps / len(self))
        self._total, self._behind = fit.max_epochs, run.step
        self._epochs = run.epochs(self._total)
        self._next()
        for counts in (fit.epoch_progress.current, fit.epoch_progress.total):
            counts.ready = counts.started = counts.processed = counts.completed = self._epoch

    def _check(self) -> None:
        trainer = self._trainer
        try:
            len(self)
        except TypeError:
            raise BadInput(
                "the adapter does not take a training set without a length: Lightning draws its batches ahead"
            ) from None
        if trainer.ckpt_path is not None:
            raise BadInput("a run goes on from Atoll's checkpoints: leave ckpt_path out, or load the weights yourself")
        if trainer.precision == "16-mixed":
            raise BadInput("16-mixed is not taken, for its scaler's state is Lightning's own. Use bf16-mixed")
        if trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise BadInput("the adapter needs max_epochs or max_steps: an endless training has no last checkpoint")

    def __iter__(self) -> Iterator[Any]:
        """Does nothing before the first batch is asked for, for Lightning makes more of these than it uses."""
        if self._begun:
            self._next()
        self._begun = True
        self._pass = iter(self._loader)
        for batch in self._pass:
            self._level()
            yield batch

    def _level(self) -> None:
        """Lightning counts a batch when it has drawn it: this one's place in its epoch."""
        current, counts = self._loader.current, self._trainer.fit_loop.epoch_loop.batch_progress.current
        assert current is not None
        accumulated = self._trainer.accumulate_grad_batches
        if accumulated > 1 and counts.ready:
            return  # a pass begins with the first batch of an update, and then it counts itself
        index = current.start // self._loader.own_batch
        index = min(index - index % accumulated, len(self) - 1 - (not self._run.last_batch))
        counts.ready = counts.started = counts.processed = counts.completed = index

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        # A plan may have made batches larger or smaller than Lightning counts on.
        last = self._run.last_batch
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = trainer.fit_loop._data_fetcher.done = last

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.strategy._show_rank()
        current = self._loader.current
        if current is not None and current.step >= self._behind and not (current.step + 1) % trainer.log_every_n_steps:
            self._report()
        if self._run.last_batch:
            next(self._pass, None)  # Lightning counts and does not ask for the end, where a step boundary is

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self._report()

    def _report(self) -> None:
        numbers = {name: value.item() for name, value in self._trainer.callback_metrics.items() if value.numel() == 1}
        report(self._run, numbers)

    def end(self) -> None:
        """Waits for the last checkpoint, also where the Trainer stopped in the middle of an epoch."""
        self._loader.begin_epoch(self._run.epoch)  # the batch that was handed out last counts
        if self._epoch + 1 < self._total:
            self._run.end_training()
        next(self._epochs, None)

    def _next(self) -> None:
        """The next epoch of the run; where there is none, the Trainer's end."""
        self._epoch = next(self._epochs, self._total)
        if self._epoch == self._total:
            self._trainer.should_stop = True


class _TrainerState:
    """State that Lightning would save in its own checkpoint beside model, optimizers and schedules."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def _callbacks(self) -> list[Any]:
        """Not those that write checkpoints: their paths are one worker's."""
        return [callback for callback in self._trainer.callbacks if not isinstance(callback, Checkpoint)]

    def state_dict(self) -> dict[str, Any]:
        states = {callback.state_key: callback.state_dict() for callback in self._callbacks()}
        return {
            "global_step": self._trainer.global_step,
            "logged_step": self._trainer.fit_loop.epoch_loop._batches_that_stepped,
            "callbacks": {key: state for key, state in states.items() if state},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        automatic = loop.automatic_optimization.optim_progress.optimizer.step
        for counts in (automatic.total, loop.manual_optimization.optim_step_progress.total):
            counts.ready = counts.completed = state["global_step"]
        loop._batches_that_stepped = state["logged_step"]
        for callback in self._callbacks():
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
