"""The life of a step: what happens at its boundary, in its backward pass and around its optimizer update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from atoll.agent.runtime.channel.agreement import Agreed, Meeting
from atoll.agent.runtime.channel.arriving import Plans
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
from atoll.agent.runtime.checkpoints.restore import Resumed, prepared
from atoll.agent.runtime.data.loader import Loader, LoaderSettings, known_count
from atoll.agent.runtime.data.sampler import Position, after
from atoll.agent.runtime.membership.member_state import PreparedObjects
from atoll.agent.runtime.membership.transition.view_transition import ExchangeControl, ViewTransition
from atoll.agent.runtime.model.as_one import as_one
from atoll.agent.runtime.model.durable import Handover, Origin
from atoll.agent.runtime.model.inputs import check_alike, check_loss, likeness
from atoll.agent.runtime.model.prepared_parameters import unfrozen
from atoll.agent.runtime.model.snapshot import Tracked
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.agent.runtime.session.probe import description
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.backward.batch_statistics import batch_statistics_layers, name_drop_last
from atoll.agent.runtime.step.backward.counted_passes import CountedPasses
from atoll.agent.runtime.step.backward.gradient_passes import clip_norm
from atoll.agent.runtime.step.backward.unapplied_gradients import UnappliedGradients
from atoll.agent.runtime.step.collective_calls import CollectiveCalls
from atoll.agent.runtime.step.drivers.build import build_driver
from atoll.agent.runtime.step.drivers.coordination import StepNumbers
from atoll.agent.runtime.step.drivers.evaluated_model import EvaluatedModel
from atoll.agent.runtime.step.drivers.step_driver import PassState, StepDriver, StepParts
from atoll.agent.runtime.step.measures.clock import Lap, StepClock, marks_of
from atoll.agent.runtime.step.measures.non_finite import NonFinite
from atoll.agent.runtime.step.optimizers.dry_run import DryRunSteps
from atoll.agent.runtime.step.optimizers.scaled_steps import ScaledSteps
from atoll.agent.runtime.step.state.fingerprint import fingerprint_of
from atoll.agent.runtime.step.state.randomness import seed_step
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.agent.runtime.step.state.step_reporter import Silent, StepReporter
from atoll.agent.runtime.step.update_hooks import UpdateHooks, UpdateParts
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts, StepEvents
from atoll.errors import AtollError, BadInput, PeerLost
from atoll.v1.agents_pb2 import Prepared
from atoll.v1.common_pb2 import LinkSample


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
        self._scaled_steps = ScaledSteps(optimizers, self._update_left_out, for_show=self._without_effect)
        self.passes, self._plans = PassState(), Plans(session, self._schedule, self.loader.lead)
        self._part = engine_parts.part if engine_parts is not None else None
        self._step_parts = StepParts(
            session=session,
            model=model,
            optimizers=optimizers,
            loader=self.loader,
            schedule=self._schedule,
            clock=self._clock,
            dry_run=self._muted,
            evaluated=EvaluatedModel(model),
            passes=self.passes,
            events=StepEvents(
                open_pass=self._open_pass,
                gradients_leave=self._gradients_leave,
                muted=self._muted,
                loss_scale=self._scaled_steps.loss_scale,
                lost=self.lost,
                non_finite=self._non_finite.found,
            ),
            own=self._own,
            links_busy=self._links_busy,
        )
        self._driver = self._new_driver()
        self._carried = UnappliedGradients(model, optimizers)
        self.state = StateKeeper(session, model, optimizers, tracked, self._driver, part=self._part)
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
                why_not=self._why_not_in_place,
                tolerates_loss_mid_step=self._tolerates_loss_mid_step,
                rewind=self._rewind if self._part is not None else None,
            ),
        )
        self.calls = CollectiveCalls(
            session,
            self._driver,
            self.succession,
            state=self.state,
            leave_if_lost=self._shut_down_if_lost,
            broken_if_lost=self._broken_if_lost,
        )
        self._counted = CountedPasses(model, settings.batch_size, self.calls.total_count)
        self._updates = UpdateHooks(
            self._driver,
            model,
            optimizers,
            UpdateParts(
                session=session,
                state=self.state,
                succession=self.succession,
                carried=self._carried,
                non_finite=self._non_finite,
                scaled=self._scaled_steps,
                rate_factor=self._rate_factor,
                batches_per_update=self._tell_batches,
            ),
        )
        self._scaled_steps.wrap()
        self._hooks = name_drop_last(layers)

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
        self._start_driver(self.loader.position, origin)
        self.state.start(self.loader.position)
        if session.link is not None:
            self._prepared = prepared(self._model, self._optimizers, self.loader, trains, self.state.bytes)
            session.link.outbox.add(prepared=self._prepared)
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
        return self.passes.open and self._session.group is not None

    def backward(self, loss: torch.Tensor, *, count: float | None, summed: bool) -> None:
        """count: of what the loss is the mean over; None: of the samples. summed: it is a sum over the samples."""
        check_loss(loss)
        batch, weight, after = self.loader.current, None, self.passes.gradients_pending and not self.passes.unsent
        if batch is not None and not self.passes.broken:
            local = self.passes.local
            weight = self._counted.weight(count, batch, local=local, after_exchange=after)
        if self._session.probe is not None and self.loader.current is not None:
            self._session.probe.saw(self.loader.current, loss)
        if summed and self._driver.weight > 0:  # for it will count so
            loss = loss / self._driver.weight
        alone = weight is not None and not self._driver.weighs_gradients
        self._driver.begin_backward(loss, weight=weight)
        # Of weight 0 nothing counts, and a GradScaler sees to overflows itself.
        if batch is not None and self._driver.weight > 0 and not (self._scaled_steps.scaling or self._muted()):
            self._non_finite.loss(loss.detach())
        try:
            if not alone:
                loss.backward()  # type: ignore[no-untyped-call]
            elif weight:  # 0 * NaN would be NaN
                (loss * weight).backward()  # type: ignore[no-untyped-call]
        except Exception:
            self.passes.open = self._session.group is not None  # a single worker may skip this batch and continue
            raise
        self._driver.end_backward()

    def step(self, batch: Any) -> torch.Tensor:
        """In place of the script's own forward pass, backward pass and update: its engine's, of the batch that the
        loader gave. Returns the loss, []."""
        if self._driver.engine is None:
            return self._driver.step(batch)  # refuses
        self._driver.begin_backward()
        loss = torch.zeros(())
        if self.succession.broken is None:
            try:
                loss = self._driver.step(batch)
            except PeerLost as error:
                taken = self.loader.current
                if taken is not None and self._driver.rewind(taken.step):
                    self.state.shutdown.updated = False
                self.lost(error)
            else:  # also where this rank had no part in it, or made no update of its own
                self.passes.gradients_pending, self.state.shutdown.updated = False, True
                self._non_finite.loss(loss)
        if self.succession.broken is not None:  # an engine's step is whole, or nothing of it is left
            self.succession.broken.updated, self.passes.gradients_pending = True, False
        self._driver.end_backward(agrees=False)  # at the boundary: what the script does until then is of a whole step
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes are local."""
        self._driver.expect_local()
        before, self.passes.local = self.passes.local, True
        try:
            yield
        finally:
            self.passes.local = before

    def clip(self, max_norm: float, parameters: Iterable[torch.Tensor] | None) -> torch.Tensor | None:
        """Clip the next update. Returns the norm, or None where the strategy clips later than this."""
        if not self.passes.gradients_pending:
            raise BadInput("run.clip_grad_norm before run.backward: there is no gradient to clip yet")
        self._updates.refuse_unsent("run.clip_grad_norm")
        if self.succession.broken is None and self._driver.clip(max_norm):
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
            self._session.link.outbox.add(prepared=self._prepared)

    @property
    def learning_rate_factor(self) -> float:
        """Of the step under way; between two epochs that of the last."""
        if self._session.probe is not None:
            return self._session.probe.learning_rate_factor
        batch = self.loader.current
        step = batch.step if batch is not None else max(self.loader.position.step - 1, 0)
        return self._schedule.planned_at(step).learning_rate_factor

    def statistics(self) -> Mapping[str, float]:
        return self._driver.coordination.statistics(self._driver.sent_bytes())

    def finish(self) -> None:
        """All epochs are done: wait until every rank has come here, then a last checkpoint, which all wait for."""
        self.succession.abandon("the script left its loop over the loader")
        self._boundary(last=True)
        self.state.change_begins()
        with self._shut_down_if_lost():
            self._driver.flush(Meeting.END)
            if self._session.group is not None:
                if self._part is None:
                    self.calls.model.level(self._session.group)
                self._session.group.barrier()
        torch.clear_autocast_cache()
        self.calls.training_ended = True
        self._driver.leave()
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
        self._updates.close()
        self._carried.close()
        self._scaled_steps.close()
        self._driver.close()

    # --- the views of the run

    def _new_driver(self, learned: object = None) -> StepDriver:
        """Build the driver for the members that the session names. learned: in the view before."""
        self._agreed = Agreed(self._schedule.newest_contiguous(), False)
        return build_driver(self._step_parts, self._agreed, self._engine_parts, learned)

    def _start_driver(self, position: Position, origin: Origin | None) -> None:
        self._driver.start(position, self.loader.share, origin)
        if self._session.link is not None:
            self._session.link.outbox.links_so_far = self._links

    def _begin_view(self, position: Position, recovered: Recovered | None, origin: Origin | None) -> None:
        """Collective: go on with other members, from the state that all have alike, and `origin` beside it, or from
        what all have in memory. Raises PeerLost, CheckpointError."""
        self.state.memory.close()
        self._driver.close(followed=True)
        if recovered is not None:
            resumed = Resumed(recovered.checkpoint, recovered.own)
            self.state.go_back(resumed)
            origin = resumed.origin()
        if origin is not None:
            self.state.between_views(self._driver, origin)
        try:
            self._begin_driver(position, recovered, origin)
        except AtollError:
            self._driver.close(followed=True)
            if origin is not None:
                self.state.between_views(self._driver, origin)
            raise
        self.state.view_begun()

    def _begin_driver(self, position: Position, recovered: Recovered | None, origin: Origin | None) -> None:
        if self._session.group is not None and self._part is None:  # of stages the engine does
            self._session.group.broadcast_tensors(list(self._model.buffers()))
        with unfrozen(self._trained):
            self._driver = self._new_driver(self._driver.learned)
        self.calls.driver = self._updates.driver = self._driver
        self.passes.begin_view()
        self._plans.start()
        self._carried.go_back()
        self._counted.forget()
        self.state.begin_view(self._driver, position.step, None if recovered is None else recovered.generation)
        with unfrozen(self._trained):
            self._start_driver(position, origin)

    def _leave_view(self) -> None:
        """At a boundary whose update is whole: for the next view, where all ranks know of it. Raises PeerLost."""
        if self._agreed.view <= self._session.view or self._agreed.stop or not self.loader.batches_left:
            return  # after an epoch's last batch the script does what needs all who were there
        self.state.change_begins()
        handed_over: Handover | None = None
        if self._driver.needs_rollback:
            keeps = self.succession.keeps_unsent(self._agreed.view)
            handed_over = self._driver.hand_over(self.loader.position.step, keeps_unsent=keeps)
        self.succession.leave(self._agreed.view, handed_over)

    def _why_not_in_place(self) -> str | None:
        return self._driver.why_not_in_place

    def _tolerates_loss_mid_step(self) -> bool:
        return self._driver.tolerates_loss_mid_step

    def _rewind(self, step: int) -> bool:
        return self._driver.rewind(step)

    # --- the boundary

    def _boundary(self, *, last: bool = False) -> None:
        """Between two steps: before the loader slices a batch, and after an epoch's last. last: no step follows."""
        if self.passes.open:
            raise BadInput("the loader was asked for the next batch in the middle of a backward pass")
        self.calls.model.refuse_training("the next batch")
        lap = self._clock.boundary_begins()
        self._updates.at_boundary()
        if not last and self.succession.at_boundary(pending=self.passes.gradients_pending):
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
        if not self.passes.gradients_pending:  # while accumulating, the last whole update is what counts
            self._carried.whole()
            self._keep_state(step, last=last)
        seed_step(self._session.seed, self._session.place.rank, step)
        self._clock.boundary_ends()
        self._session.throttle.resume()

    def _end_step(self, lap: Lap) -> None:
        """Report the step that is over, if it was one that counts."""
        batch, driver = self.loader.current, self._driver
        metrics = driver.coordination.take_metrics(driver.sent_bytes())
        numbers = StepNumbers(*driver.exchange_times(), metrics)
        if batch is None:
            return  # what was waited for between two epochs is of no step
        if self._muted.end_rehearsal():
            if self.passes.gradients_pending:  # the script counts otherwise than in the run before: no update
                for parameter in self._model.parameters():
                    parameter.grad = None
                self.passes.gradients_pending = False
            return
        driver.coordination.agreement.batch_over()
        plan = self._schedule.plan_at(batch.step)
        self._reporter.report(
            batch,
            lap,
            plan=plan,
            norms=self.passes.norms,
            numbers=numbers,
            non_finite=self._non_finite.end_step(batch.step),
        )

    def _advance_trial(self, step: int) -> None:
        """Once a trial has trained enough, the model becomes the same on every rank; once it was judged, the run ends,
        whatever the script would still do."""
        probe = self._session.probe
        if probe is None:
            return
        if probe.trained(step) and not self.passes.gradients_pending:
            statistics = self.statistics()  # before what follows, which is none of it
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
                if (lost := self._driver.lost) is not None:
                    raise PeerLost(lost)
                self._agree(self.loader.position.step)
                if not last and not self.passes.gradients_pending:
                    self._leave_view()
            except PeerLost as error:
                self._driver.coordination.check_alike()
                in_place = self._driver.needs_rollback or self._driver.step_is_atomic
                if self._driver.step_is_atomic:
                    self.state.stands(self.loader.position)
                if last or not in_place:
                    self.succession.unable("it was lost outside of a step", error)
                    self._leave(error)
                self.lost(error)
                if self.succession.lost_at_boundary(pending=self.passes.gradients_pending):
                    return True
            else:
                return False

    def _agree(self, step: int) -> None:
        """Take up what all ranks know alike, and bring the weights to where this boundary needs them."""
        self._agreed = self._driver.coordination.agree(self._own())
        # Now: how large the next batch is decides whether this is an epoch's end.
        self._plans.agree(max(step - 1, 0), self._agreed.plan_id)
        due = not self.passes.gradients_pending and (self._agreed.stop or self.state.saver.due(step))
        self._driver.boundary(wait=due or not self.loader.batches_left)
        self._clock.waited(self._driver.waited(), at_boundary=True)

    def _keep_state(self, step: int, *, last: bool) -> None:
        """The update is whole: checkpoints of it begin where they are due; a stop that was agreed is carried out."""
        self.state.whole(
            self.loader.position,
            self._agreed,
            snapshot=not self._muted.rehearsing,  # what was resumed from is on disk already
            # At its end another model may be what training ended with.
            to_disk=not self._driver.flush_changes or (self.loader.batches_left > 0 and not last),
        )
        if self._agreed.stop:
            self.state.shutdown.drained(step, self._reporter)
        self.state.released()

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

    def _links(self) -> list[LinkSample]:
        """Return the traffic of connections, with checkpoint copies on them. May be called by any thread."""
        samples, copied_bytes = self._driver.coordination.links(), self.state.memory.copied_beside()
        for sample in samples:
            sample.copied_bytes = copied_bytes.get(sample.peer, 0)
        return samples

    # --- what strategies and optimizers report

    def _open_pass(self) -> None:
        self._driver.begin_from_hook()

    def _gradients_leave(self) -> None:
        self._session.throttle.pay()
        self._clock.bucket_ready()

    def _rate_factor(self) -> float:
        return self.learning_rate_factor

    def _tell_batches(self, batches: int) -> None:
        self._tell(batches_per_update=batches)

    def _without_effect(self) -> bool:
        """True if what the script does counts for nothing: a GradScaler learns nothing from it."""
        return self.succession.broken is not None

    def _update_left_out(self, optimizer: torch.optim.Optimizer) -> None:
        self._updates.left_out(optimizer)

    # --- when others fail

    @contextmanager
    def _shut_down_if_lost(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            self._driver.coordination.check_alike()
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
        self._driver.coordination.check_alike()
        if not self.succession.possible:
            self._leave(error)
        why = "an epoch's last batch was shown again" if self._muted() else self._driver.why_not_in_place
        self.succession.lose(error, mid_step=why)
        self.passes.broken, self.passes.open = True, False
        self._driver.break_off()

    def _leave(self, error: AtollError) -> NoReturn:
        """Save what is whole, and end."""
        batch = self.loader.current
        self.state.shutdown.lost(error, self.loader.position.step, after(batch) if batch is not None else None)
