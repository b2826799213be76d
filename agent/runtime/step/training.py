"""The life of a step: what happens at its boundary, in its backward pass and around its optimizer update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from atoll.agent.runtime.api.inputs import check_alike, check_loss, likeness
from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
from atoll.agent.runtime.checkpoints.restore import prepared
from atoll.agent.runtime.checkpoints.resume import Resumed
from atoll.agent.runtime.checkpoints.snapshot import Tracked
from atoll.agent.runtime.data.loader import Loader, LoaderSettings, known_count
from atoll.agent.runtime.data.sampler import BatchSlice, Position, after
from atoll.agent.runtime.membership.aborted_step import without_gradients
from atoll.agent.runtime.membership.member_state import PreparedObjects
from atoll.agent.runtime.membership.view_transition import ExchangeControl, ViewTransition
from atoll.agent.runtime.step.backward.accumulation import NORMS_EVERY_STEPS
from atoll.agent.runtime.step.backward.backward_pass import BackwardPass
from atoll.agent.runtime.step.backward.batch_statistics import batch_statistics_layers, name_drop_last
from atoll.agent.runtime.step.backward.counted_passes import CountedPasses
from atoll.agent.runtime.step.backward.gradient_passes import clip_norm
from atoll.agent.runtime.step.backward.half_batches import HalfBatches
from atoll.agent.runtime.step.backward.unapplied_gradients import UnappliedGradients
from atoll.agent.runtime.step.capabilities import EngineParts, Norms, StepEvents
from atoll.agent.runtime.step.collective_calls import CollectiveCalls
from atoll.agent.runtime.step.measures.clock import Lap, StepClock, marks_of
from atoll.agent.runtime.step.measures.non_finite import NonFinite
from atoll.agent.runtime.step.measures.probe import description
from atoll.agent.runtime.step.measures.step_reporter import Silent, StepReporter
from atoll.agent.runtime.step.optimizers.as_one import as_one
from atoll.agent.runtime.step.optimizers.dry_run import DryRunSteps
from atoll.agent.runtime.step.optimizers.learning_rate import LearningRate
from atoll.agent.runtime.step.optimizers.other_optimizers import OtherOptimizers
from atoll.agent.runtime.step.optimizers.prepared_parameters import unfrozen
from atoll.agent.runtime.step.optimizers.scaled_steps import ScaledSteps
from atoll.agent.runtime.step.plans.agreement import Agreed, Meeting
from atoll.agent.runtime.step.plans.arriving import Plans
from atoll.agent.runtime.step.plans.schedule import PlanSchedule
from atoll.agent.runtime.step.state.durable import Handover, Origin
from atoll.agent.runtime.step.state.fingerprint import fingerprint_of
from atoll.agent.runtime.step.state.randomness import seed_step
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.agent.runtime.step.step_exchange import StepExchange
from atoll.errors import AtollError, BadInput, DeadlineExceeded, PeerLost
from atoll.v1.agents_pb2 import Prepared
from atoll.v1.common_pb2 import LEVEL_INFO


class Training:
    """A prepared model, its optimizers and its loader. All methods run on the training thread, but for `overdue`."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: LoaderSettings,
        tracked: Mapping[str, Tracked],
        *,
        engine_parts: EngineParts | None = None,
    ) -> None:
        """engine_parts: where the script calls `step` in place of its own passes and updates."""
        self._session, self._engine_parts = session, engine_parts
        self._prepared: Prepared | None = None  # as the agent was told
        if layers := batch_statistics_layers(model):
            settings = replace(settings, min_local_batch=2)
        self.model = self._model = model
        self._optimizers, self._settings, self._tracked = optimizers, settings, tracked
        self._trained = [one for one in model.parameters() if one.requires_grad]
        place = session.place
        self._schedule = PlanSchedule(place.world_size, session.first, samples=known_count(settings))
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
        self._reporter = StepReporter(session.link.outbox) if session.link is not None else Silent()
        self._muted, self._non_finite = DryRunSteps(session.probe), NonFinite(session)
        self._exchange = self._new_exchange()
        self._halves: HalfBatches | None = None
        self._backward = BackwardPass(
            session,
            self.loader,
            self._schedule,
            self._clock,
            self._exchange,
            own=self._own,
            muted=self._muted,
            if_lost=self._broken_if_lost,
            own_norms=self._own_norms(),
            refuse_training=lambda what: self.calls.model.refuse_training(what),  # noqa: PLW0108 - there is none yet
        )
        self._part = engine_parts.part if engine_parts is not None else None
        self.state = StateKeeper(session, model, optimizers, tracked, self._exchange, part=self._part)
        self._plans = Plans(session, self._schedule, self.loader.lead)
        self._learning_rates = {optimizer: LearningRate(optimizer) for optimizer in optimizers}
        self._others = OtherOptimizers(model, optimizers)
        self._carried = UnappliedGradients(model, optimizers)
        self.succession = ViewTransition(
            session,
            PreparedObjects(
                model,
                optimizers,
                tracked,
                self.loader,
                likeness(session, model, settings, self.loader.order, self._part),
            ),
            self.state,
            self._schedule,
            ExchangeControl(
                rebuild=self._begin_view,
                why_not=lambda: self._exchange.why_not_in_place,
                tolerates_loss_mid_step=lambda: self._exchange.tolerates_loss_mid_step,
                rewind=self._rewind if self._part is not None else None,
            ),
        )
        self._scaled_steps = ScaledSteps(
            optimizers, self._update_left_out, for_show=lambda: self.succession.broken is not None
        )
        self.calls = CollectiveCalls(
            session,
            model,
            self.loader,
            self._backward,
            self.succession,
            state=self.state,
            exchange=lambda: self._exchange,
            own=self._own,
            loss_scale=self._scaled_steps.loss_scale,
            leave_if_lost=self._shut_down_if_lost,
            broken_if_lost=self._broken_if_lost,
        )
        self._counted = CountedPasses(model, settings.batch_size, self.calls.total_count)
        self._hooks = [
            *(optimizer.register_step_pre_hook(self._before_update) for optimizer in optimizers),
            *(optimizer.register_step_pre_hook(self._look_at_gradients) for optimizer in optimizers),
            *(optimizer.register_step_post_hook(self._after_update) for optimizer in optimizers),
            *name_drop_last(layers),
        ]

    def start(self) -> None:
        """Make all ranks equal: from the newest checkpoint where there is one, else from rank 0.

        Raises BadInput if ranks were given different things, CheckpointError for a checkpoint of another model,
        PeerLost."""
        session = self._session
        if session.joins:
            return  # `enter` does that, with the state of the others
        # Before a checkpoint changes the optimizer's settings: it tells the model as the script prepares it.
        trains = fingerprint_of(description(self._settings, self._model, self._optimizers)) if session.link else ""
        if session.group is not None:
            check_alike(session, likeness(session, self._model, self._settings, self.loader.order, self._part))
            self._plans.start()
        self.state.restore(self.loader)
        if session.group is not None:
            if self._part is None:  # of stages the engine does
                session.group.broadcast_tensors([*self._model.parameters(), *self._model.buffers()])
            session.group.expect_answers_within(session.collective_timeout_s)
        resumed = self.state.resumed
        origin = resumed.origin() if resumed is not None else None
        self._exchange.start(self.loader.position, self.loader.share, origin)
        self.state.start(self.loader.position)
        if session.link is not None:
            self._prepared = prepared(self._model, self._optimizers, self.loader, trains, self.state.bytes)
            session.link.outbox.prepared(self._prepared)
        seed_step(session.seed, session.place.rank, self.loader.position.step)
        torch.clear_autocast_cache()

    def join_run(self) -> None:
        """Before the first epoch: a worker that joins waits until it is taken into a view of the run."""
        self.succession.join_run()

    def begin_epoch(self, epoch: int) -> None:
        """Go on with this epoch, or start it; at the very end of it after a resume, show its last batch again."""
        self.succession.abandon("the script left its loop over the loader")
        if self._session.link is not None:
            self._session.link.trained = False  # there may be a second loop
        self.calls.training_ended = False
        self.loader.begin_epoch(epoch)
        position, resumed = self.loader.position, self.state.resumed
        resumed_here = resumed is not None and position == resumed.position
        if resumed_here and position.consumed and not self.loader.batches_left:
            self._muted.rehearse(self._model, as_one(self._optimizers), self._tracked)
            self.state.change_begins()  # what the rehearsal changes is put back
            self.loader.show_again()

    @property
    def stuck(self) -> bool:
        """A backward pass was broken off: its collectives are still under way."""
        return self._backward.open and self._session.group is not None

    def backward(self, loss: torch.Tensor, *, count: float | None, summed: bool) -> None:
        """count: of what the loss is the mean over; None: of the samples. summed: it is a sum over the samples."""
        check_loss(loss)
        batch, weight, after = self.loader.current, None, self._backward.gradients_pending and not self._backward.unsent
        if batch is not None and not self._backward.broken:
            local = self._backward.local
            weight = self._counted.weight(count, batch, local=local, after_exchange=after)
        if self._session.probe is not None and self.loader.current is not None:
            self._session.probe.saw(self.loader.current, loss)
        if summed and self._backward.weight > 0:  # for it will count so
            loss = loss / self._backward.weight
        alone = weight is not None and not self._exchange.weighs_gradients
        self._backward.begin(loss, weight=weight)
        # Of weight 0 nothing counts, and a GradScaler sees to overflows itself.
        if batch is not None and self._backward.weight > 0 and not (self._scaled_steps.scaling or self._muted()):
            self._non_finite.loss(loss.detach())
        try:
            if not alone:
                loss.backward()  # type: ignore[no-untyped-call]
            elif weight:  # 0 * NaN would be NaN
                (loss * weight).backward()  # type: ignore[no-untyped-call]
        except Exception:
            self._backward.break_off()
            raise
        self._backward.end()

    def step(self, batch: Any) -> torch.Tensor:
        """In place of the script's own forward pass, backward pass and update: its engine's, of the batch that the
        loader gave. Returns the loss, []."""
        engine, taken = self._exchange.engine, self.loader.current
        if engine is None:
            raise BadInput("the strategy has no engine of its own: call run.backward(loss) and optimizer.step()")
        self._backward.begin()
        assert taken is not None  # or begin had refused
        loss = torch.zeros(())
        if self.succession.broken is None:
            try:
                loss = engine.step(batch, taken)
            except PeerLost as error:
                if self._rewind(taken.step):
                    self.state.shutdown.updated = False
                self.lost(error)
            else:  # also where this rank had no part in it, or made no update of its own
                self._backward.gradients_pending, self.state.shutdown.updated = False, True
                self._non_finite.loss(loss)
        if self.succession.broken is not None:  # an engine's step is whole, or nothing of it is left
            self.succession.broken.updated, self._backward.gradients_pending = True, False
        self._backward.end(agrees=False)  # at the boundary: what the script does until then is of a step that is whole
        return loss

    def _rewind(self, step: int) -> bool:
        """An engine's step that raised, or its last one, as if it had never begun."""
        engine = self._exchange.engine
        return engine is not None and engine.rewind(step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes are local."""
        self._exchange.expect_local()
        before, self._backward.local = self._backward.local, True
        try:
            yield
        finally:
            self._backward.local = before

    def clip(self, max_norm: float, parameters: Iterable[torch.Tensor] | None) -> torch.Tensor | None:
        """Clip the next update. Returns the norm, or None where the strategy clips later than this."""
        if not self._backward.gradients_pending:
            raise BadInput("run.clip_grad_norm before run.backward: there is no gradient to clip yet")
        self._refuse_unsent("run.clip_grad_norm")
        if self.succession.broken is None and self._exchange.clip(max_norm):
            if parameters is not None:
                raise BadInput("the strategy clips the whole update; call run.clip_grad_norm without parameters")
            return None
        return clip_norm(self._model.parameters() if parameters is None else parameters, max_norm)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the step that is next, by rank, relative."""
        return self._schedule.planned_at(self.loader.position.step).shares

    def tell_epochs(self, total: int) -> None:
        """How many epochs the script trains in all."""
        self.calls.epochs = total
        self._tell(epochs=max(total, 0))

    def _tell(self, **changed: int) -> None:
        """Report what changed of what the controller knows of the script."""
        if self._session.link is not None and self._prepared is not None:
            for name, value in changed.items():
                setattr(self._prepared, name, value)
            self._session.link.outbox.prepared(self._prepared)

    @property
    def learning_rate_factor(self) -> float:
        """Of the step under way; between two epochs that of the last."""
        if self._session.probe is not None:
            return self._session.probe.learning_rate_factor
        batch = self.loader.current
        step = batch.step if batch is not None else max(self.loader.position.step - 1, 0)
        return self._schedule.planned_at(step).learning_rate_factor

    def statistics(self) -> Mapping[str, float]:
        return self._exchange.statistics()

    def finish(self) -> None:
        """All epochs are done: wait until every rank has come here, then a last checkpoint, which all wait for."""
        self.succession.abandon("the script left its loop over the loader")
        self._boundary(last=True)
        self.state.change_begins()
        with self._shut_down_if_lost():
            self._exchange.flush(Meeting.END, self._own())
            if self._session.group is not None:
                if self._part is None:
                    self.calls.model.level(self._session.group)
                self._session.group.barrier()
        torch.clear_autocast_cache()
        self.calls.training_ended = True
        self._exchange.leave()
        self._reporter.finish()
        self.tell_trained()
        with self._shut_down_if_lost():
            self.state.save_last()

    def tell_trained(self) -> None:
        """The loop over the epochs is over: from now on this rank may end while others go on."""
        if self._session.link is not None:
            self._session.link.trained = True

    def close(self) -> None:
        self.state.close()
        self.loader.close()
        for hook in self._hooks:
            hook.remove()
        for rate in self._learning_rates.values():
            rate.close()
        self._others.close()
        self._carried.close()
        self._scaled_steps.close()
        if self._halves is not None:
            self._halves.close()
        self._exchange.close()

    # --- the views of the run

    def _new_exchange(self, learned: object = None) -> StepExchange:
        """With the members that the session names. learned: in the view before."""
        events = StepEvents(
            open_pass=lambda: self._backward.begin_from_hook(),  # noqa: PLW0108 - there is none yet
            gradients_leave=lambda: self._backward.gradients_leave(),  # noqa: PLW0108 - there is none yet
            muted=self._muted,
            loss_scale=lambda: self._scaled_steps.loss_scale(),  # noqa: PLW0108 - there is none yet
            lost=self.lost,
            non_finite=self._non_finite.found,
        )
        self._agreed = Agreed(self._schedule.newest_contiguous(), False)
        return StepExchange(
            self._session,
            self._model,
            self._optimizers,
            events=events,
            busy=self._links_busy,
            copied_beside=lambda: self.state.memory.copied_beside(),  # noqa: PLW0108 - there is none yet
            agreed=self._agreed,
            engine_parts=self._engine_parts,
            learned=learned,
        )

    def _begin_view(self, position: Position, recovered: Recovered | None, origin: Origin | None) -> None:
        """Collective: go on with other members, from the state that all have alike, and `origin` beside it, or from
        what all have in memory. Raises PeerLost, CheckpointError."""
        self.state.memory.close()
        self._exchange.close(followed=True)
        if recovered is not None:
            resumed = Resumed(recovered.checkpoint, recovered.own)
            self.state.go_back(resumed)
            origin = resumed.origin()
        if origin is not None:
            self.state.between_views(self._exchange, origin)
        try:
            self._begin_exchange(position, recovered, origin)
        except AtollError:
            self._exchange.close(followed=True)
            if origin is not None:
                self.state.between_views(self._exchange, origin)
            raise
        self.state.view_begun()

    def _begin_exchange(self, position: Position, recovered: Recovered | None, origin: Origin | None) -> None:
        if self._session.group is not None and self._part is None:  # of stages the engine does
            self._session.group.broadcast_tensors(list(self._model.buffers()))
        with unfrozen(self._trained):
            self._exchange = self._new_exchange(self._exchange.learned)
        self._backward.resume(self._exchange, self._own_norms())
        self._plans.start()
        self._carried.go_back()
        self._counted.forget()
        self.state.begin_view(self._exchange, position.step, None if recovered is None else recovered.generation)
        with unfrozen(self._trained):
            self._exchange.start(position, self.loader.share, origin)

    def _leave_view(self) -> None:
        """At a boundary whose update is whole: for the next view, where all ranks know of it. Raises PeerLost."""
        if self._agreed.view <= self._session.view or self._agreed.stop or not self.loader.batches_left:
            return  # after an epoch's last batch the script does what needs all who were there
        self.state.change_begins()
        handed_over: Handover | None = None
        if self._exchange.needs_rollback:
            keeps = self.succession.keeps_unsent(self._agreed.view)
            handed_over = self._exchange.hand_over(self.loader.position.step, self._own(), keeps_unsent=keeps)
        self.succession.leave(self._agreed.view, handed_over)

    def _own_norms(self) -> Callable[[], Norms] | None:
        """What tells of each rank's own gradients, where the strategy does not see them all combined."""
        own = self._session.link is not None and not self._exchange.combines
        if own and self._halves is None:
            notice = partial(self._session.notice, LEVEL_INFO)
            self._halves = HalfBatches(self._model, self._session.seed, self._sampled, notice)
        elif not own and self._halves is not None:
            self._halves.close()
            self._halves = None
        return self._halves.take if self._halves is not None else None

    # --- the boundary

    def _boundary(self, *, last: bool = False) -> None:
        """Between two steps: before the loader slices a batch, and after an epoch's last. last: no step follows."""
        if self._backward.open:
            raise BadInput("the loader was asked for the next batch in the middle of a backward pass")
        self.calls.model.refuse_training("the next batch")
        lap = self._clock.boundary_begins()
        for rate in self._learning_rates.values():
            rate.restore()  # of an optimizer.step() that raised
        if not last and self.succession.at_boundary(pending=self._backward.gradients_pending):
            self._clock.boundary_ends()
            return
        self._end_step(lap)
        step = self.loader.position.step
        self._advance_trial(step)
        if self._agree_again_if_lost(last=last):
            self._clock.boundary_ends()
            return
        step = self.loader.position.step
        if self._session.link is not None:
            self._session.link.step, self._session.link.plan = step, self._schedule.plan_at(step)
        self.succession.trains(step)
        if not self._backward.gradients_pending:  # while accumulating, the last whole update is what counts
            self._carried.whole()
            self._keep_state(step, last=last)
        seed_step(self._session.seed, self._session.place.rank, step)
        self._clock.boundary_ends()
        self._session.throttle.resume()

    def _end_step(self, lap: Lap) -> None:
        """Report the step that is over, if it was one that counts."""
        batch, numbers = self.loader.current, self._exchange.take_step()
        if batch is None:
            return  # what was waited for between two epochs is of no step
        if self._muted.end_rehearsal():
            if self._backward.gradients_pending:  # the script counts otherwise than in the run before: no update
                for parameter in self._model.parameters():
                    parameter.grad = None
                self._backward.gradients_pending = False
            return
        self._exchange.batch_over()
        plan = self._schedule.plan_at(batch.step)
        self._reporter.report(
            batch,
            lap,
            plan=plan,
            norms=self._backward.norms,
            numbers=numbers,
            non_finite=self._non_finite.end_step(batch.step),
        )

    def _advance_trial(self, step: int) -> None:
        """Once a trial has trained enough, the model becomes the same on every rank; once it was judged, the run ends,
        whatever the script would still do."""
        probe = self._session.probe
        if probe is None:
            return
        if probe.trained(step) and not self._backward.gradients_pending:
            statistics = self._exchange.statistics()  # before what follows, which is none of it
            self.calls.synchronize()
            probe.judge(step, self._model, statistics)
        if probe.over(step):
            self.state.shutdown.tried(probe)

    def _own(self) -> Agreed:
        """What this rank knows."""
        self._plans.take()
        stop = (link := self._session.link) is not None and link.stop is not None
        return Agreed(
            self._schedule.newest_contiguous(), stop, self.state.memory.progress(), self.succession.proposed()
        )

    def _agree_again_if_lost(self, *, last: bool) -> bool:
        """`_agree` with whoever is left, and leave for another view where that was agreed. Returns whether the batch
        that follows is for show, because the script's update is still to come."""
        while True:
            try:
                if (lost := self._exchange.lost) is not None:
                    raise PeerLost(lost)
                self._agree(self.loader.position.step)
                if not last and not self._backward.gradients_pending:
                    self._leave_view()
            except PeerLost as error:
                self._exchange.check_alike()
                in_place = self._exchange.needs_rollback or self._exchange.step_is_atomic
                if self._exchange.step_is_atomic:
                    self.state.stands(self.loader.position)
                if last or not in_place:
                    self.succession.unable("it was lost outside of a step", error)
                    self._leave(error)
                self.lost(error)
                if self.succession.lost_at_boundary(pending=self._backward.gradients_pending):
                    return True
            else:
                return False

    def _agree(self, step: int) -> None:
        """Take up what all ranks know alike, and bring the weights to where this boundary needs them."""
        self._agreed = self._exchange.agree(self._own())
        # Now: how large the next batch is decides whether this is an epoch's end.
        self._plans.agree(max(step - 1, 0), self._agreed.plan_id)
        due = not self._backward.gradients_pending and (self._agreed.stop or self.state.saver.due(step))
        self._exchange.boundary(wait=due or not self.loader.batches_left)
        self._clock.waited(self._exchange.waited(), at_boundary=True)

    def _keep_state(self, step: int, *, last: bool) -> None:
        """The update is whole: checkpoints of it begin where they are due; a stop that was agreed is carried out."""
        self.state.whole(
            self.loader.position,
            self._agreed,
            snapshot=not self._muted.rehearsing,  # what was resumed from is on disk already
            # At its end another model may be what training ended with.
            to_disk=not self._exchange.flush_changes or (self.loader.batches_left > 0 and not last),
        )
        if self._agreed.stop:
            self.state.shutdown.drained(step, self._reporter)
        self.state.released()

    def _sampled(self) -> BatchSlice | None:
        """The batch that is being trained, in steps whose gradients are sampled."""
        batch = self.loader.current
        return batch if batch is not None and batch.step % NORMS_EVERY_STEPS == 0 else None

    def _handed_out(self) -> None:
        torch.clear_autocast_cache()  # the boundary may have changed weights: others' updates, a restored state
        self._session.throttle.pay()
        self._clock.handed_out()

    def _links_busy(self, busy: bool) -> None:
        """Training fills the links, or does no more: copies of checkpoints stand back meanwhile. On any thread."""
        if busy:
            self.state.memory.pause()
        else:
            self.state.memory.resume()

    # --- the update

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """What its step is called with, where that is something else."""
        if self.succession.broken is not None:
            return self.succession.broken.in_place_of(optimizer, args, kwargs)
        self.calls.model.refuse_training("optimizer.step()")
        self._carried.check(optimizer)
        self._refuse_unsent("optimizer.step()")
        self.state.update_begins()
        rate = self._learning_rates[optimizer]
        rate.multiply(self.learning_rate_factor)
        if not self._muted():
            try:
                self._exchange.before_update()
            except AtollError as error:
                rate.restore()
                if not isinstance(error, PeerLost | DeadlineExceeded):
                    raise
                self.lost(error)
                return self._before_update(optimizer, args, kwargs)
        return without_gradients(optimizer, args, kwargs, when=lambda: self.succession.broken is not None)

    def _look_at_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        scaled = getattr(optimizer, "grad_scale", None) is not None
        if self.succession.broken is None and not (scaled or self._muted()):
            self._non_finite.gradients(optimizer)

    def _refuse_unsent(self, what: str) -> None:
        if self._backward.unsent:
            raise BadInput(
                f"{what} on gradients that only this worker has: the last backward pass was under run.no_sync(). Make "
                "the last one of an accumulation outside of it, also where run.last_batch ends one early"
            )

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.succession.broken is not None:
            self.succession.broken.updated, self._backward.gradients_pending = True, False
            return
        self._carried.applied(optimizer)
        self._backward.gradients_pending = False
        if not self._muted() and self._backward.accumulation.updated():
            self._tell(batches_per_update=self._backward.accumulation.batches)
        self.state.shutdown.updated = True
        self._session.throttle.pay()
        if self._muted():
            self._muted.undo_update()
        else:
            self._exchange.after_update()
        torch.clear_autocast_cache()  # the script's region may be around several updates
        self._clock.updated()

    def _update_left_out(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients overflowed: an update that moves nothing, for the others wait for this rank's part of it."""
        self._before_update(optimizer, (optimizer,), {})
        self._learning_rates[optimizer].restore()
        self._after_update(optimizer)

    # --- when others fail

    @contextmanager
    def _shut_down_if_lost(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            self._exchange.check_alike()
            self.succession.unable("it was lost outside of a step", error)
            self._leave(error)

    @contextmanager
    def _broken_if_lost(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            self.lost(error)

    def lost(self, error: AtollError) -> None:
        """A peer is gone in a step. Where the run may go on without it, what the script does up to its next batch
        counts for nothing; else save what is whole, and leave. Raises BadInput where it is not gone but waits for
        what this rank's script does not do."""
        self._exchange.check_alike()
        if not self.succession.possible:
            self._leave(error)
        why = "an epoch's last batch was shown again" if self._muted() else self._exchange.why_not_in_place
        self.succession.lose(error, mid_step=why)
        self._backward.break_pass()

    def _leave(self, error: AtollError) -> NoReturn:
        """Save what is whole, and end."""
        batch = self.loader.current
        self.state.shutdown.lost(error, self.loader.position.step, after(batch) if batch is not None else None)
