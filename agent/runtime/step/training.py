"""The life of a step: what happens at its boundary, in its backward pass and around its optimizer update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.autograd import Variable

from atoll.agent.runtime.api.inputs import check_alike, check_loss
from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.memory.checkpoint_tier import CheckpointTier
from atoll.agent.runtime.checkpoints.memory.cost.budget import size_of_state
from atoll.agent.runtime.checkpoints.restore import prepared, restore
from atoll.agent.runtime.checkpoints.resume import Resumed
from atoll.agent.runtime.checkpoints.saver import Saver, await_upload
from atoll.agent.runtime.checkpoints.snapshot import Snapshot, Tracked
from atoll.agent.runtime.data.loader import BatchSlice, Loader, LoaderSettings, sample_count
from atoll.agent.runtime.data.sampler import after
from atoll.agent.runtime.step.agreement import Agreed
from atoll.agent.runtime.step.clock import Lap, StepClock, marks_of
from atoll.agent.runtime.step.consistency import Consistency
from atoll.agent.runtime.step.fingerprint import fingerprint_of
from atoll.agent.runtime.step.learning_rate import LearningRate
from atoll.agent.runtime.step.plans import Plans
from atoll.agent.runtime.step.probe import Probe, description
from atoll.agent.runtime.step.randomness import seed_step
from atoll.agent.runtime.step.rehearsal import Rehearsal
from atoll.agent.runtime.step.schedule import PlanSchedule
from atoll.agent.runtime.step.shutdown import Shutdown
from atoll.agent.runtime.step.step_reporter import Silent, Teller
from atoll.agent.runtime.step.synchronisation import Callbacks, Norms, Pass, Synchronisation
from atoll.errors import AtollError, BadInput, CheckpointError, DeadlineExceeded, PeerLost
from atoll.strategies import registry
from atoll.strategies.declaration import load
from atoll.v1.common_pb2 import LEVEL_WARNING

NORMS_EVERY_STEPS: Final = 10
LINKS_EVERY_STEPS: Final = 10


class Training:
    """A prepared model, its optimizer and its loader. All methods run on the training thread, but for `overdue`."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: LoaderSettings,
        tracked: Mapping[str, Tracked],
    ) -> None:
        self._session = session
        self._model, self._optimizer, self._settings, self._tracked = model, optimizer, settings, tracked
        self._resumed: Resumed | None = None
        self._rehearsal: Rehearsal | None = None
        place = session.place
        self._schedule = PlanSchedule(place.world_size, session.first, samples=sample_count(settings.dataset))
        self.loader: Loader[Any] = Loader(
            settings,
            rank=place.rank,
            seed=session.seed,
            schedule=self._schedule,
            boundary=self._boundary,
            handed_out=self._handed_out,
            device=session.device,
        )
        model.to(session.device)
        self._clock = StepClock(marks_of(session.device))
        self._teller = Teller(session.link.outbox) if session.link is not None else Silent()
        self._consistency = Consistency()
        self._agreed = Agreed(self._schedule.newest_contiguous(), False)
        callbacks = Callbacks(self._begin_from_hook, self._before_launch, self.lost, self._links_busy, self._links_idle)
        build = load(registry.of(session.strategy).worker)
        self._sync: Synchronisation = build(session, model, optimizer, callbacks, self._agreed)
        self._snapshot = Snapshot(model, optimizer, tracked, self._sync)
        self.saver = Saver(session, self._snapshot)
        self.shutdown = Shutdown(session, self._snapshot, self.saver, self._sync, self._consistency)
        self._memory = CheckpointTier(session, self._snapshot)
        self._norms = Norms()
        self._pass_open = False
        self._gradients_pending = False  # a backward pass since the last optimizer.step()
        self._plans = Plans(session, self._schedule, self.loader.lead)
        self._learning_rate = LearningRate(optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]

    def start(self) -> None:
        """Make all ranks equal: from the newest checkpoint where there is one, else from rank 0.

        Raises BadInput if ranks were given different things, CheckpointError for a checkpoint of another model,
        PeerLost."""
        session, directory = self._session, self._session.checkpoint.directory
        # Before a checkpoint changes the optimizer's settings: it tells the model as the script prepares it.
        trains = fingerprint_of(description(self._settings, self._model, self._optimizer)) if session.link else ""
        if session.group is not None:
            check_alike(session, self._model, self._settings)
            self._plans.start()
        restored = restore(session, self.saver, self._model, self._optimizer, self.loader)
        self._resumed = restored.resumed
        for name in self._tracked:
            self.restore_tracked(name)
        if directory is not None:
            size = size_of_state(self._model, self._optimizer, self._snapshot)
            self._memory.start(restored.step, restored.generation, size)
        if session.group is not None:
            session.group.broadcast_tensors([*self._model.parameters(), *self._model.buffers()])
            session.group.expect_answers_within(session.collective_timeout_s)
        self._sync.start(self.loader.position, self._resumed.origin() if self._resumed is not None else None)
        if directory is not None:
            self._snapshot.take(self.loader.position)
            self.saver.check_packable()
        if session.link is not None:
            session.link.outbox.prepared(prepared(self._model, self.loader, self._settings, trains))
        seed_step(session.seed, session.place.rank, self.loader.position.step)

    def restore_tracked(self, name: str) -> None:
        """Give a tracked object its state of the checkpoint from which this run went on."""
        if self._resumed is not None:
            try:
                self._resumed.restore_tracked(name, self._tracked[name])
            except CheckpointError as error:
                self._session.notice(LEVEL_WARNING, str(error))

    def begin_epoch(self, epoch: int) -> None:
        """Go on with this epoch, or start it; at the very end of it after a resume, show its last batch again."""
        self.loader.begin_epoch(epoch)
        position = self.loader.position
        resumed_here = self._resumed is not None and position == self._resumed.position
        if resumed_here and position.consumed and not self.loader.batches_left:
            self._rehearsal = Rehearsal(self._model, self._optimizer, self._tracked)
            self.loader.show_again()

    @property
    def stuck(self) -> bool:
        """A backward pass was broken off: its collectives are still under way."""
        return self._pass_open and self._session.group is not None

    def backward(self, loss: torch.Tensor) -> None:
        check_loss(loss)
        self._begin_pass()
        if self._session.probe is not None and self.loader.current is not None:
            self._session.probe.saw(self.loader.current, loss)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception:
            self._pass_open = self._session.group is not None  # alone, the user may skip this batch and go on
            raise
        self._end_pass()

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Clip the next update. Returns the norm, or None where the strategy clips later than this."""
        if not self._gradients_pending:
            raise BadInput("run.clip_grad_norm before run.backward: there is no gradient to clip yet")
        if self._sync.clip(max_norm):
            return None
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def synchronize(self) -> None:
        """All ranks together, between two steps: bring everything that is held back into the weights."""
        if self._pass_open or self._gradients_pending:
            raise BadInput(
                "run.synchronize between run.backward and optimizer.step(); call it after the step. A script that "
                "accumulates gradients has to step at its epoch's last batch too: `if ... or run.last_batch:`"
            )
        self._memory.wait_for_reads()  # weights change that a checkpoint may still be read from
        with self._shut_down_if_lost():
            self._sync.boundary(settle=True)
            self._sync.finish()

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """All ranks together: each of these numbers added up over them."""
        if self._session.group is not None:
            with self._shut_down_if_lost():
                numbers = self._session.group.sum_numbers(numbers)
        return tuple(numbers)

    @property
    def learning_rate_factor(self) -> float:
        """Of the step under way; between two epochs that of the last."""
        batch_slice = self.loader.current
        step = batch_slice.step if batch_slice is not None else max(self.loader.position.step - 1, 0)
        return self._schedule.terms_at(step).learning_rate_factor

    def statistics(self) -> Mapping[str, float]:
        return self._sync.statistics()

    def finish(self) -> None:
        """All epochs are done: wait until every rank has come here, then a last checkpoint."""
        self._boundary(last=True)
        self._memory.wait_for_reads()
        with self._shut_down_if_lost():
            self._sync.boundary(settle=True)
            self._sync.finish()
            if self._session.group is not None:
                self._session.group.barrier()
        self._sync.leave()
        self._teller.finish()
        if not self.shutdown.updated:  # else gradients wait for an update that never comes; the last checkpoint stays
            self.saver.save()
            with self._shut_down_if_lost():
                await_upload(self._session, self.saver)

    def close(self) -> None:
        self.saver.close()
        self._memory.close()
        self.loader.close()
        for hook in self._hooks:
            hook.remove()
        self._learning_rate.close()
        self._sync.close()

    # --- the boundary

    def _boundary(self, *, last: bool = False) -> None:
        """Between two steps: by the loader before it cuts a batch, and after an epoch's last. last: no step follows."""
        if self._pass_open:
            raise BadInput("the loader was asked for the next batch in the middle of a backward pass")
        lap = self._clock.boundary_begins()
        self._learning_rate.restore()  # of an optimizer.step() that raised
        batch_slice = self.loader.current
        if batch_slice is not None and self._rehearsal is not None:
            self._end_rehearsal(self._rehearsal)
        elif batch_slice is not None:
            self._tell(batch_slice, lap)
        else:
            self._sync.step_numbers()  # what was waited for between two epochs is of no step
        self._plans.take()
        step = self.loader.position.step
        if self._session.probe is not None:
            self._advance_probe(self._session.probe, step)
        with self._shut_down_if_lost():
            self._agreed = self._sync.agreed(self._own_word())
            # Now: how large the next batch is decides whether this is an epoch's end.
            self._plans.agree(max(step - 1, 0), self._agreed.plan_id)
            whole = not self._gradients_pending
            due = whole and (self._agreed.stop or self.saver.due(step))
            self._sync.boundary(settle=due or not self.loader.batches_left)
            self._clock.waited(self._sync.waited(), at_boundary=True)
        if self._session.link is not None:
            self._session.link.step, self._session.link.plan = step, self._schedule.plan_at(step)
        if not self._gradients_pending:  # in the middle of an accumulation, the last whole update is what counts
            self._consistency.begin_update()
            self.shutdown.updated = False
            if self.saver.enabled and self._rehearsal is None:  # what was resumed from is on disk already
                self._memory.wait_for_reads()
                self._snapshot.take(self.loader.position)
                if not self._sync.finish_changes or (self.loader.batches_left and not last):
                    self.saver.at_boundary(step)  # else it may be the end of training, with another model
                self._remember()
            if self._agreed.stop:
                self.shutdown.drained(step, self._teller)
            self._consistency.end_update()
        seed_step(self._session.seed, self._session.place.rank, step)
        self._clock.boundary_ends()
        self._session.throttle.resume()

    def _own_word(self) -> Agreed:
        stop = (link := self._session.link) is not None and link.stop is not None
        return Agreed(self._schedule.newest_contiguous(), stop, self._memory.progress())

    def _remember(self) -> None:
        complete = self._memory.at_boundary(self._agreed.memory)
        if complete is not None and self._session.link is not None:
            self._session.link.outbox.memory(complete)

    def _end_rehearsal(self, rehearsal: Rehearsal) -> None:
        rehearsal.undo()
        self._rehearsal = None
        if self._gradients_pending:  # the script counts otherwise than the run before it, and did not update
            for parameter in self._model.parameters():
                parameter.grad = None
            self._gradients_pending = False

    def _tell(self, batch_slice: BatchSlice, lap: Lap) -> None:
        plan = self._schedule.plan_at(batch_slice.step)
        self._teller.tell(batch_slice, lap, plan=plan, norms=self._norms, numbers=self._sync.step_numbers())
        if batch_slice.step % LINKS_EVERY_STEPS == 0:
            self._teller.links(self._sync.links())

    def _advance_probe(self, probe: Probe, step: int) -> None:
        """Once the trial has trained enough, the model becomes the same on every rank; once it was judged, the run
        ends, whatever the script would still do."""
        if probe.trained(step) and not self._gradients_pending:
            statistics = self._sync.statistics()  # before what follows, which is none of it
            self.synchronize()
            probe.judge(step, self._model, statistics)
        if probe.over(step):
            self.shutdown.tried(probe)

    @property
    def _muted(self) -> bool:
        """What the script does now changes nothing that others or later steps see."""
        probe = self._session.probe
        return self._rehearsal is not None or (probe is not None and probe.judging)

    # --- the backward pass

    def _handed_out(self) -> None:
        self._session.throttle.pay()
        self._clock.handed_out()

    def _begin_pass(self, *, seen: bool = True) -> None:
        """seen: the backward pass begins here; else it came to its first gradient already."""
        batch_slice = self.loader.current
        if batch_slice is None:
            raise BadInput("run.backward outside the loop over the loader: there is no batch that is being trained")
        if self._pass_open:
            raise BadInput("an earlier backward pass failed half-way; the other ranks wait for the rest of it")
        self._waited()
        self._session.throttle.pay()
        self._clock.backward_begins(seen=seen and not self._gradients_pending)
        self._plans.take()
        opened = Pass(
            batch_slice=batch_slice,
            own=self._own_word(),
            params=self._schedule.terms_at(batch_slice.step).params,
            # Accumulated gradients are no longer this rank's own.
            sampled=not self._gradients_pending and batch_slice.step % NORMS_EVERY_STEPS == 0,
            muted=self._muted,
        )
        with self._shut_down_if_lost():
            self._sync.begin(opened)
        self._norms = Norms()
        self._gradients_pending = self._pass_open = True

    def _begin_from_hook(self) -> None:
        """The user called loss.backward() himself: the pass must still be closed before he sees the gradients."""
        self._begin_pass(seen=False)
        Variable._execution_engine.queue_callback(self._end_pass)

    def _before_launch(self) -> None:
        self._session.throttle.pay()
        self._clock.bucket_ready()

    def _links_busy(self) -> None:
        self._memory.pause()

    def _links_idle(self) -> None:
        self._memory.resume()

    def _waited(self) -> None:
        """Take down what the training thread waited for others since it was last asked."""
        waited_s = self._sync.waited()
        self._session.throttle.waited(waited_s)
        self._clock.waited(waited_s)

    def _end_pass(self) -> None:
        throttle = self._session.throttle
        throttle.pay()
        with self._shut_down_if_lost():
            self._norms = self._sync.end()
        self._waited()
        self._clock.backward_ends()
        throttle.resume()
        self._pass_open = False

    # --- the update

    def _before_update(self, *_: object) -> None:
        self._consistency.begin_update()
        self._memory.wait_for_reads()
        self._learning_rate.multiply(self.learning_rate_factor)
        if not self._muted:
            try:
                self._sync.before_update()
            except AtollError as error:
                self._learning_rate.restore()
                if isinstance(error, PeerLost | DeadlineExceeded):
                    self.lost(error)
                raise

    def _after_update(self, *_: object) -> None:
        self._gradients_pending = False
        self.shutdown.updated = True
        self._session.throttle.pay()
        if not self._muted:
            self._sync.after_update()
        elif self._session.probe is not None:
            self._session.probe.undo_update()
        self._clock.updated()

    # --- when others fail

    @contextmanager
    def _shut_down_if_lost(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            self.lost(error)

    def lost(self, error: AtollError) -> NoReturn:
        """A peer is gone. Save what is whole, and leave."""
        batch_slice = self.loader.current
        self.shutdown.lost(error, self.loader.position.step, after(batch_slice) if batch_slice is not None else None)
