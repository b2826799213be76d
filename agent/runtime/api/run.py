"""The training API: `atoll.init` and `atoll.Run`."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from atoll.agent.runtime.agent_link import exits
from atoll.agent.runtime.agent_link.link import AgentLink
from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.api.engine_inputs import engine_parts, example_of, round_settings
from atoll.agent.runtime.api.joining import join
from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.data.evaluation import EvaluationLoader
from atoll.agent.runtime.data.loader import Loader, LoaderSettings
from atoll.agent.runtime.data.orders import StreamOrder
from atoll.agent.runtime.model.inputs import listed_optimizers, one_module
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.model.snapshot import Tracked
from atoll.agent.runtime.pipeline.layers import MakesLayer
from atoll.agent.runtime.pipeline.prepared import MakesOptimizer, prepared_stage
from atoll.agent.runtime.session.probe import Probe
from atoll.agent.runtime.session.session import CheckpointSettings, Session
from atoll.agent.runtime.step.drivers.evaluated_model import eval_mode
from atoll.agent.runtime.step.training import Training
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts
from atoll.errors import BadInput, PeerLost, SettingError, exit_codes
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings, load
from atoll.telemetry.telemetry_limits import MAX_METRICS
from atoll.v1.common_pb2 import LEVEL_WARNING
from atoll.v1.worker_pb2 import Stop

ModelT = TypeVar("ModelT", bound=nn.Module | Sequence[nn.Module])
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])

_current: Run | None = None


def init(
    *,
    seed: int = 0,
    strategy: str | StrategySettings = "dense",
    checkpoint_directory: str | Path | None = None,
    checkpoint_every: int = 0,
) -> Run:
    """Join the job this process belongs to; started by hand, a run of one worker. Once per process.

    strategy: "dense", "stale-sparse", or the settings of one, e.g. atoll.StaleSparse(sparsity=0.995).
    seed: of initial weights, order of samples, dropout. Models built after this call start equal on every rank.
    checkpoint_directory, checkpoint_every: where to save, and every how many steps (0: only at the end and when a peer
    is lost). Under an Atoll agent the submitted job's settings hold in place of these, and its seed unless that is 0.
    Raises BadInput for wrong arguments or environment, DeadlineExceeded if the agent does not answer."""
    global _current  # noqa: PLW0603 - a process is one worker
    if _current is not None:
        raise BadInput("atoll.init was called already; use the Run that it returned, or close() that one first")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise BadInput(
            "a loader's worker process is running the training script itself. Put what the script does under "
            '`if __name__ == "__main__":`'
        )
    if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, int) or checkpoint_every < 0:
        raise SettingError(
            "checkpoint_every", checkpoint_every, "must be a whole number of steps", "0 is only at the end"
        )
    if checkpoint_every and checkpoint_directory is None:
        raise BadInput(f"checkpoint_every = {checkpoint_every} needs checkpoint_directory, where they shall go")
    place = WorkerPlace.from_environment()
    directory = Path(checkpoint_directory).absolute() if checkpoint_directory is not None else None
    own = CheckpointSettings(directory=directory, every_steps=checkpoint_every, keep=2)
    chosen = registry.find(strategy).settings() if isinstance(strategy, str) else strategy
    if not isinstance(chosen, StrategySettings):
        raise BadInput(f"strategy is a {type(chosen).__name__}; pass a name or atoll.StaleSparse(...)")
    probe = Probe.from_environment(place.rank) if place.agent is None else None
    if probe is not None:
        seed, chosen = probe.seed(seed), probe.strategy(chosen)
        own = CheckpointSettings(directory=None, every_steps=0, keep=2)  # a trial neither goes on nor leaves anything
    _current = Run(place, seed, chosen, own, probe)
    gc.freeze()  # what was imported stays: a full collection over it costs a step 0.1 s, and the process's end 1 s
    return _current


class Run:
    """This worker's part in the job."""

    def __init__(
        self,
        place: WorkerPlace,
        seed: int,
        strategy: StrategySettings,
        checkpoint: CheckpointSettings,
        probe: Probe | None = None,
    ) -> None:
        self._place = place
        self._probe = probe
        self._pid = os.getpid()
        self._training: Training | None = None
        self._tracked: dict[str, Tracked] = {}
        self._peer_lost = False
        self._ends = False  # `end_training` was called
        self._left_early = False  # in the loop over `epochs`, or gone from it
        self._session: Session
        self._link = AgentLink(place, place.agent) if place.agent is not None else None
        if self._link is not None:
            self._link.on_overdue = self._overdue
        atexit.register(self._at_exit)
        try:
            self._session = join(place, self._link, seed=seed, strategy=strategy, checkpoint=checkpoint, probe=probe)
        except PeerLost as error:
            self._leave_without_peer(error)  # half a process group may be there: `_at_exit` ends the process past it
        except BaseException:
            self.close()
            raise
        if self._session.helping is None:
            import_module("torch._dynamo")  # the first optimizer would, where `init` has frozen; a volunteer makes none

    @property
    def job(self) -> str:
        """The job's id, the same in all of its runs; empty where no agent started this worker."""
        return self._session.job

    @property
    def rank(self) -> int:
        """This worker's number, 0 to world_size - 1."""
        return self._session.place.rank

    @property
    def world_size(self) -> int:
        """Return the number of workers. It may change between two batches of a run, and `rank` with it."""
        return self._session.place.world_size

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine."""
        return self._session.place.local_rank

    @property
    def is_main(self) -> bool:
        """True for rank 0, which prints and writes what is needed once."""
        return self._session.place.is_main

    @property
    def device(self) -> torch.device:
        """Return the device of the model and of the loader's batches."""
        return self._session.device

    @property
    def step(self) -> int:
        """Return how many batches the whole job has trained. With gradient accumulation several make one update."""
        return self._training.loader.position.step if self._training is not None else 0

    @property
    def epoch(self) -> int:
        """The epoch that is being trained, from 0."""
        return self._training.loader.position.epoch if self._training is not None else 0

    @property
    def last_batch(self) -> bool:
        """True while the last batch of an epoch is trained, also in an epoch that was resumed.

        Scripts that accumulate gradients make an update there too."""
        return self._prepared("run.last_batch").loader.at_last_batch

    @property
    def total_batch(self) -> int:
        """Samples of this step of the whole job: `batch_size`, or what the plan says in its place. An epoch's last
        batch may be shorter."""
        return self._prepared("run.total_batch").loader.total_batch

    @property
    def learning_rate_factor(self) -> float:
        """Return the plan's factor on the learning rates of this step. It holds while optimizer.step() runs."""
        return self._prepared("run.learning_rate_factor").learning_rate_factor

    def prepare(
        self,
        model: ModelT,
        optimizer: OptimizerT,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        scheduler: Tracked | Sequence[Tracked] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
    ) -> tuple[ModelT, OptimizerT, Loader[Any]]:
        """Make them ready for training together, and go on from the newest checkpoint where there is one. Once per run.

        model, optimizer: come back themselves, moved to `device`, equal on every rank. Several go as tuples or lists:
        prepare((generator, discriminator), (optimizer_g, optimizer_d), dataset, batch_size=...). Every parameter that
        trains belongs to one of the optimizers.
        dataset: with a length and an index; or a stream, that every worker iterates whole; or a DataLoader, whose
        dataset, sampler and settings are taken over.
        batch_size: samples per step of the whole job, split over the workers by the plan. Needed unless a DataLoader is
        given. pin_memory: whether batches are pinned; None: on a CUDA device they are copied through pinned memory.
        scheduler: short for track("scheduler", scheduler); several are "scheduler_0", "scheduler_1" and so on.
        Returns (model, optimizer, loader). Raises BadInput for what cannot be trained, CheckpointError for a checkpoint
        of another model."""
        if isinstance(dataset, DataLoader):
            settings = LoaderSettings.from_dataloader(dataset, batch_size, pin_memory)
        elif batch_size is None:
            raise BadInput("run.prepare needs batch_size, the whole job's samples per step")
        else:
            settings = LoaderSettings(
                dataset=dataset,
                batch_size=batch_size,
                shuffle=shuffle,
                drop_last=drop_last,
                num_workers=num_workers,
                collate_fn=collate_fn,
                pin_memory=pin_memory,
            )
        schedulers = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
        for place, one in enumerate(schedulers):
            if one is not None:
                self.track("scheduler" if len(schedulers) == 1 else f"scheduler_{place}", one)
        training = self._start(settings, model, optimizer)
        return model, optimizer, training.loader

    def prepare_pipeline(  # noqa: PLR0917 - in the order of `prepare`
        self,
        model: nn.Module | Sequence[nn.Module | MakesLayer],
        optimizer_factory: MakesOptimizer,
        loss: Callable[[Any, Any], torch.Tensor],
        dataset: Dataset[Any],
        batch_size: int,
        micro_batches: int = 1,
        *,
        split_at: Sequence[str] | None = None,
        clip_norm: float | None = None,
        round_batches: int = 64,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> tuple[Callable[[Any], torch.Tensor], Loader[Any]]:
        """Make a model that an engine trains ready: call it in place of `prepare`, once per run.

        Strategies `groups`, whose replicas train each at its own pace, and `volunteer` have an engine.

        With stages = 1 a replica is a worker, with more it is a pipeline of so many. model: for stages an nn.Sequential
        or a list of its layers, each a module or a function that makes one; on the meta device it takes no memory, and
        a worker makes its own layers alone. split_at: names of the layers (their keys in the model) with which the
        stages after the first begin; without it they are cut by what layers cost.
        optimizer_factory: called with the parameters of the worker's stage. loss: of what the model gave and the
        targets, the mean. dataset: gives (inputs, targets). batch_size: samples of one update of one replica; under
        `volunteer`, of all ranks.
        micro_batches: that a batch is split into, each by itself through the model. clip_norm: the most that the L2
        norm of a batch's gradient may be, over all stages. round_batches: updates of a round, in the mean over the
        replicas; the loader gives rounds, at whose ends all replicas are equal and checkpoints are taken.
        Returns (train_round, loader): `loss = train_round(each)` for what the loader gives. Raises BadInput."""
        session = self._session
        stages, helps = session.strategy.stages_of_model, session.helping is not None
        place = StagePlace(0, stages, 1) if helps else StagePlace.of(self.rank, self.world_size, stages)
        parts = engine_parts(
            place,
            dataset,
            loss,
            collate_fn,
            batch_size=batch_size,
            micro_batches=micro_batches,
            shuffle=shuffle,
            clip_norm=clip_norm,
        )
        if helps:
            self._help(model, parts)
        settings = round_settings(parts, round_batches, makes_rounds=session.strategy.makes_rounds)
        try:
            stage, optimizer, part = prepared_stage(
                session,
                place,
                model,
                optimizer_factory,
                split_at=split_at,
                example=lambda: example_of(parts, self.device),
            )
        except PeerLost as error:
            self._leave_without_peer(error)
        training = self._start(settings, stage, optimizer, replace(parts, part=part))
        return training.script.step, training.loader

    def _start(
        self,
        settings: LoaderSettings,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        parts: EngineParts | None = None,
    ) -> Training:
        if self._training is not None:
            raise BadInput("run.prepare was called already. Models that train together go into one call, as a tuple")
        settings.check(self.world_size if not settings.batch_of else settings.batch_of)
        together = one_module(model)
        if self._session.helping is not None:
            self._help(together)
        optimizers = listed_optimizers(together, optimizer)
        if self._probe is not None:
            settings = self._probe.begin(settings, together, optimizers)
        training = Training(self._session, together, optimizers, settings, self._tracked, engine_parts=parts)
        if isinstance(order := training.loader.order, StreamOrder) and order.stateful:
            self.track("stream", order)
        try:
            training.start()
        except PeerLost as error:
            self._leave_without_peer(error)
        self._training = training
        return training

    def _help(self, model: nn.Module | Sequence[nn.Module | MakesLayer], parts: EngineParts | None = None) -> NoReturn:
        """Compute as a volunteer until the run ends. Nothing of the script after this is for a volunteer."""
        strategy = registry.of(self._session.strategy)
        if parts is None or not strategy.volunteer:
            raise BadInput(f"strategy {strategy.name} has no use for volunteers here: call run.prepare_pipeline")
        raise exits.WorkerExit(load(strategy.volunteer)(self._session, model, parts))

    def track(self, name: str, tracked: Tracked) -> None:
        """Keep this in checkpoints too: a scheduler, a gradient scaler, an average of weights.

        name: the same in every run. tracked: has state_dict() and load_state_dict(). Raises BadInput; CheckpointError
        if its state has a type that no checkpoint can hold."""
        if not isinstance(tracked, Tracked):
            raise BadInput(f"{type(tracked).__name__} lacks state_dict() or load_state_dict(); they are what is saved")
        if not name.isidentifier() or name in self._tracked:
            raise BadInput(f"track({name!r}, ...): the name must be a Python identifier that is not tracked yet")
        if self._session.checkpoint.directory is not None:
            pack_state({f"tracked.{name}": tracked.state_dict()})
        self._tracked[name] = tracked
        if self._training is not None:
            self._training.state.restore_tracked(name)

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs that are left of `total`, going on in the middle of one after a resume.

        What follows the loop over the loader runs again after a resume at the end of an epoch; the loop then shows the
        last batch once more, without effect."""
        training = self._prepared("run.epochs")
        training.join_run()
        training.tell_epochs(total)
        for epoch in range(training.loader.position.epoch, total):
            training.begin_epoch(epoch)
            self._left_early = True  # unless the script comes back for more
            try:
                yield epoch
            except GeneratorExit:  # it does not: `break`, or an exception
                training.tell_trained()
                raise
            self._left_early = False
            if self._ends:
                break
        else:
            training.loader.begin_epoch(max(total, training.loader.position.epoch))
        training.finish()

    def end_training(self) -> None:
        """No epoch after this one: the loop over `epochs` ends by itself, with the last checkpoint, which `break`
        leaves out. Every rank says so in the same epoch: decide on what all know alike, e.g. what `sum` gave."""
        self._prepared("run.end_training")
        self._ends = True

    def backward(
        self, loss: torch.Tensor, *, weight: float | None = None, reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        """Call it in place of loss.backward(): afterwards every p.grad is that of the whole job's batch.

        loss: one number, the mean over this worker's part of the batch; with reduction="sum" the sum over it.
        weight: how much this worker counts, where that is not by samples: of a mean over tokens, how many these are.
        Weights of passes under `no_sync` and of the one after them count together. All ranks give it in the same
        passes, and wait for each other's. Raises BadInput."""
        training = self._prepared("run.backward")
        if reduction not in {"mean", "sum"} or (reduction == "sum" and weight is not None):
            raise BadInput(
                f'run.backward got reduction = {reduction!r}, weight = {weight}; reduction is "mean" or "sum", and a '
                "sum has no weight"
            )
        try:
            count = float(weight) if weight is not None else None
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of many numbers
            raise BadInput(f"run.backward takes a single number as weight, e.g. tokens.item(): {error}") from error
        training.script.backward(loss, count=count, summed=reduction == "sum")

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes add gradients up on this worker and exchange nothing; the next one outside exchanges
        all of them at once. For gradient accumulation, as DDP's no_sync: `with run.no_sync(): run.backward(loss)`.

        Meanwhile p.grad is this worker's part: added up over the workers it is the gradient. Every rank does so in the
        same passes, and optimizer.step() comes after one outside."""
        return self._prepared("run.no_sync").script.no_sync()

    def clip_grad_norm(self, max_norm: float, parameters: Iterable[torch.Tensor] | None = None) -> torch.Tensor | None:
        """Scale gradients down to a global L2 norm of max_norm. Call it between backward and optimizer.step().

        parameters: those of the optimizer that steps next, where several train; without them the norm is of all.
        Under `dense` what torch.nn.utils.clip_grad_norm_ does; returns the norm before. Under `stale-sparse` it is the
        norm of the combined sparse update, which is clipped when it is complete; returns None."""
        if not max_norm > 0:  # NaN too
            raise BadInput(f"run.clip_grad_norm got max_norm = {max_norm}; it must be above 0")
        return self._prepared("run.clip_grad_norm").script.clip(float(max_norm), parameters)

    def synchronize(self) -> None:
        """Make the model that trains the same on every rank. All ranks call it together.

        Under `stale-sparse` and `local-steps` this waits for all updates and exchanges all that was not sent, once, in
        full. It changes what is trained next: to evaluate, use `evaluation`, which does not. The end of training does
        it by itself; under `dense` there is nothing to do."""
        self._prepared("run.synchronize").calls.synchronize()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, the model is in eval mode, without gradients, and has the same weights and buffers on every rank:
        those of a checkpoint of this moment. Training continues afterwards as if it had not been evaluated.

            with run.evaluation():
                for inputs, labels in held_out:  # of run.evaluation_loader
                    ...

        All ranks enter together, between two batches or after the last one, and may be inside for different times.
        Raises BadInput."""
        training = self._prepared("run.evaluation")
        with training.calls.evaluation(), eval_mode(training.model):
            yield

    def sum(self, *numbers: float) -> tuple[float, ...]:
        """Each of these numbers added up over all ranks, the same on every rank to the bit. All ranks call it together.

        For losses and counts of a validation set that ranks share, and for what all must decide alike. Raises
        BadInput."""
        training = self._prepared("run.sum")
        try:
            mine = [float(number) for number in numbers]
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of many numbers
            raise BadInput(f"run.sum takes single numbers, e.g. loss.item(): {error}") from error
        return training.calls.sum(mine)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, one behind the other by rank, on every rank. All ranks call it together.

        tensor: [n, ...], with an n of each rank's own; a number counts as [1]. Returns [sum of all n, ...]. Raises
        BadInput where dtypes or other dimensions differ between ranks."""
        if not isinstance(tensor, torch.Tensor):
            raise BadInput(f"run.gather got a {type(tensor).__name__}; it takes a tensor. For numbers there is run.sum")
        return self._prepared("run.gather").calls.gather(tensor)

    def gather_for_loss(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of all ranks, with gradients, for a loss that compares samples with those of other ranks: the mean
        over this rank's rows then has the gradient of the whole batch's, with `backward` as it is.

        rows: [n, ...], of this rank's samples. Returns ([sum of n, ...], place of this rank's first row in it). All
        ranks call it together in the forward pass, and wait for each other there and in the backward pass. Raises
        BadInput where dtypes or other dimensions differ between ranks."""
        if not isinstance(rows, torch.Tensor) or rows.dim() == 0:
            raise BadInput(f"run.gather_for_loss takes a tensor of rows, [n, ...]; it got {rows!r:.60}")
        return self._prepared("run.gather_for_loss").calls.gather_for_loss(rows)

    def evaluation_loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> EvaluationLoader:
        """Gives this worker's part of a dataset, so large as its share of a batch; over all workers each sample counts
        once. What they find is brought together by `sum` or `gather`.

        All ranks iterate it together. Meanwhile the model has the weights and buffers of `evaluation`; its mode and
        gradients are the script's. batch_size: samples at a time on this worker. Raises BadInput."""
        training = self._prepared("run.evaluation_loader")
        return EvaluationLoader(
            dataset,
            batch_size,
            collate_fn=collate_fn,
            part=lambda: (self.rank, training.shares),
            evaluation=training.calls.evaluation,
            device=self.device,
        )

    def statistics(self) -> dict[str, float]:
        """total_batch and learning_rate_factor of this step, and what the strategy measured since the run began.

        Under `dense` that is nothing, under `stale-sparse` among others stall_s, fresh_share and sent_bytes."""
        measured = self._prepared("run.statistics").statistics()
        plan = {"total_batch": float(self.total_batch), "learning_rate_factor": self.learning_rate_factor}
        return {**measured, **plan}

    def report(self, **metrics: float) -> None:
        """Numbers for `atoll status` and the job's curves, at the current step. At most 64, under any names; of
        more than 256 reports a second the oldest are dropped."""
        if len(metrics) > MAX_METRICS:
            raise BadInput(f"run.report got {len(metrics)} numbers; it takes at most {MAX_METRICS}")
        try:
            values = {name: float(value) for name, value in metrics.items()}
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of many numbers
            raise BadInput(f"run.report takes single numbers, e.g. loss=loss.item(): {error}") from error
        if self._training is not None and self._training.succession.member.aborted is not None:
            return  # of a batch that is trained again
        if self._link is not None:
            self._link.outbox.metrics(self.step, values)
        elif self.is_main:
            numbers = " ".join(f"{name} {value:.4g}" for name, value in values.items())
            print(f"epoch {self.epoch} step {self.step} {numbers}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Wait for a checkpoint under way, say good-bye to the agent, free the process group. Also done at exit."""
        global _current  # noqa: PLW0603
        atexit.unregister(self._at_exit)
        stuck = self._training is not None and self._training.script.stuck
        if self._training is not None:
            self._training.close()
        if self._link is not None:
            self._link.close()
        if self._probe is not None:
            self._probe.close()
        joined = getattr(self, "_session", None)  # not where joining failed
        if joined is not None and joined.group is not None:
            if stuck or self._shutdown_code is not None:
                joined.group.disconnect()
            else:
                joined.group.close()
                joined.group = None
        if _current is self:
            _current = None

    def _prepared(self, what: str) -> Training:
        if self._training is None:
            raise BadInput(
                f"{what} before run.prepare. Call run.prepare(model, optimizer, dataset, batch_size=...) first"
            )
        return self._training

    @property
    def _shutdown_code(self) -> int | None:
        """The exit code, where this worker leaves because it was asked to or a peer was lost."""
        if self._peer_lost:
            return exit_codes.PEER_LOST
        return self._training.state.shutdown.code if self._training is not None else None

    def _leave_without_peer(self, error: PeerLost) -> NoReturn:
        """Leave before training began: there is nothing to save."""
        self._peer_lost = True
        exits.say(f"rank {self._place.rank} lost a peer before training ({error}); exit code {exit_codes.PEER_LOST}")
        raise exits.WorkerExit(exit_codes.PEER_LOST)

    def _overdue(self, stop: Stop) -> None:
        """End the process, on the link thread: the training thread has not obeyed in half of the stop's grace."""
        if getattr(sys, "last_value", None) is not None:  # the script raised, and takes long to end: no peer's doing
            exits.end_now(1)
        if self._training is not None:
            self._training.state.shutdown.overdue(stop.grace_s / 4)
        exits.say(
            f"rank {self._place.rank} was asked to stop before training began ({stop.reason}); "
            f"exit code {exit_codes.PEER_LOST}"
        )
        exits.end_now(exit_codes.PEER_LOST)

    def _tell_what_is_missing(self) -> None:
        if self.is_main and self._session.checkpoint.directory is not None:
            why = "the script left its loop over run.epochs, so no checkpoint was written at the end"
            self._session.notice(LEVEL_WARNING, f"{why}. run.end_training() in place of break leaves one")

    def _at_exit(self) -> None:
        """The interpreter is ending. Where collectives are under way, or were, its own teardown could hang."""
        if os.getpid() != self._pid:
            return  # a child that the script forked: threads, peers and loader's workers are its parent's
        stuck = self._training is not None and self._training.script.stuck
        code = self._shutdown_code
        if self._left_early and code is None and not hasattr(sys, "last_value"):  # an exception says more than this
            self._tell_what_is_missing()
        self.close()
        if code is not None or stuck:
            exits.end_now(1 if code is None else code)
