"""The life of a step: what happens at its boundary, in its backward pass and around its optimizer update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atoll.agent.runtime.channel.agreement import Agreed, Meeting
from atoll.agent.runtime.channel.arriving import Plans
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
from atoll.agent.runtime.checkpoints.restore import Resumed, prepared
from atoll.agent.runtime.data.loader import Loader, LoaderSettings, known_count
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.membership.member_state import PreparedObjects
from atoll.agent.runtime.membership.transition.view_transition import ExchangeControl, ViewTransition
from atoll.agent.runtime.model.as_one import as_one
from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.model.inputs import check_alike, likeness
from atoll.agent.runtime.model.prepared_parameters import unfrozen
from atoll.agent.runtime.model.snapshot import Tracked
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.agent.runtime.session.probe import description
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.session.step_timing import StepTiming
from atoll.agent.runtime.step.backward.batch_statistics import batch_statistics_layers, name_drop_last
from atoll.agent.runtime.step.backward.counted_passes import CountedPasses
from atoll.agent.runtime.step.backward.divided_step import DividedStep
from atoll.agent.runtime.step.backward.pass_state import PassState
from atoll.agent.runtime.step.backward.unapplied_gradients import UnappliedGradients
from atoll.agent.runtime.step.boundary import Boundary, BoundaryParts
from atoll.agent.runtime.step.collective_calls import CollectiveCalls
from atoll.agent.runtime.step.drivers.build import build_driver
from atoll.agent.runtime.step.drivers.evaluated_model import EvaluatedModel
from atoll.agent.runtime.step.drivers.step_driver import CurrentView, StepDriver, StepParts
from atoll.agent.runtime.step.measures.clock import StepClock, marks_of
from atoll.agent.runtime.step.measures.gradient_density import GradientDensity
from atoll.agent.runtime.step.measures.non_finite import NonFinite
from atoll.agent.runtime.step.measures.peak_memory import PeakMemory, gauge_of
from atoll.agent.runtime.step.optimizers.dry_run import DryRunSteps
from atoll.agent.runtime.step.optimizers.scaled_steps import ScaledSteps
from atoll.agent.runtime.step.peer_loss import PeerLossHandler
from atoll.agent.runtime.step.script_passes import ScriptPasses
from atoll.agent.runtime.step.state.fingerprint import fingerprint_of
from atoll.agent.runtime.step.state.randomness import seed_step
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.agent.runtime.step.state.step_reporter import Silent, StepReporter
from atoll.agent.runtime.step.update_hooks import UpdateHooks, UpdateParts
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts, StepEvents
from atoll.agent.runtime.strategy_interface.script_checks import AllowedStrategies, Script, why_refused
from atoll.errors import AtollError, BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings
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
        model.to(session.device)
        script = Script(model=model, optimizers=optimizers, engine_parts=engine_parts, device=session.device)
        self._allowed, self._script = AllowedStrategies(session, script), script
        if layers := batch_statistics_layers(model):
            settings = replace(settings, min_local_batch=2)
        self.model = self._model = model
        self._optimizers, self._settings, self._tracked = optimizers, settings, tracked
        self._trained = [one for one in model.parameters() if one.requires_grad]
        self._density: GradientDensity | None = None  # until it is measured
        place = session.place
        self._schedule = PlanSchedule(place.world_size, session.first, samples=known_count(settings))
        self.loader: Loader[Any] = Loader(
            settings,
            rank=place.rank,
            seed=session.seed,
            schedule=self._schedule,
            boundary=self._at_boundary,
            handed_out=self._handed_out,
            passes_left=lambda: not self._without_effect(),
            divides=engine_parts is None,
            device=session.device,
        )
        self._clock = StepClock(marks_of(session.device), throttle=session.throttle)
        self._timing = session.probe.timing if session.probe is not None else None
        self._reporter: StepReporter | StepTiming | Silent = self._timing or Silent()
        if session.link is not None:
            self._reporter = StepReporter(session.link.outbox)
        self._muted, self._non_finite = DryRunSteps(session.probe), NonFinite(session)
        self._peak_memory = PeakMemory(gauge_of(session))
        self._divided = DividedStep(model, optimizers, tracked)
        self._scaled_steps = ScaledSteps(
            optimizers,
            self._update_left_out,
            for_show=self._without_effect,
            partial=lambda: self._divided.partial,
        )
        self.passes, self._plans = PassState(), Plans(session, self._schedule, self.loader.lead)
        self._part = engine_parts.part if engine_parts is not None else None
        self._step_parts = StepParts(
            session=session,
            model=model,
            optimizers=optimizers,
            loader=self.loader,
            clock=self._clock,
            dry_run=self._muted,
            evaluated=EvaluatedModel(model),
            passes=self.passes,
            divided=self._divided,
            events=StepEvents(
                open_pass=self._open_pass,
                gradients_leave=self._clock.bucket_ready,
                muted=self._muted,
                loss_scale=self._scaled_steps.loss_scale,
                lost=self._peer_lost,
                non_finite=self._non_finite.found,
            ),
            own=self._own,
            links_busy=self._links_busy,
            batches_per_update=self._tell_batches,
        )
        agreed = self._known()
        self._built = registry.of(session.strategy)  # the strategy of the current driver
        self._begun, self._begun_by = self._built, session.strategy  # and that of the newest view that was begun
        self._learned: dict[str, object] = {}  # by the name of a strategy that was left
        self._current = CurrentView(build_driver(self._step_parts, agreed, engine_parts), agreed)
        driver = self._current.driver
        self._carried = UnappliedGradients(model, optimizers)
        self.state = StateKeeper(session, model, optimizers, tracked, driver, part=self._part)
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
                refuses=self._refuses,
                rewind=self._rewind if self._part is not None else None,
            ),
        )
        self._losses = PeerLossHandler(self._current, self.succession, self.state)
        self.calls = CollectiveCalls(session, self._current, self.succession, state=self.state, losses=self._losses)
        self._counted = CountedPasses(model, settings.batch_size, self.calls.total_count)
        update_parts = UpdateParts(
            state=self.state,
            member=self.succession.member,
            carried=self._carried,
            non_finite=self._non_finite,
            scaled=self._scaled_steps,
        )
        self._updates = UpdateHooks(self._current, model, optimizers, update_parts)
        self.script = ScriptPasses(self._current, self._counted, self._updates, update_parts, self._losses)
        self._boundary = Boundary(
            BoundaryParts(
                current=self._current,
                schedule=self._schedule,
                plans=self._plans,
                state=self.state,
                succession=self.succession,
                calls=self.calls,
                updates=self._updates,
                carried=self._carried,
                losses=self._losses,
                non_finite=self._non_finite,
                peak_memory=self._peak_memory,
                reporter=self._reporter,
            )
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
        origin = resumed.origin(session) if resumed is not None else None
        self._start_driver(self.loader.position, origin)
        self.state.start(self.loader.position)
        if session.link is not None:
            self._prepared = prepared(self._model, self._optimizers, self.loader, trains, self.state.bytes)
            self._allowed.add_facts(self._prepared)
            session.link.outbox.add(prepared=self._prepared)
        if session.link is not None or self._timing is not None:
            self._density = GradientDensity(self._model)
        seed_step(session.seed, session.place.rank, self.loader.position.step)
        torch.clear_autocast_cache()

    def join_run(self) -> None:
        """Wait, as a worker that joins, for the first view of the run. Call it before the first epoch."""
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
    def shares(self) -> tuple[float, ...]:
        """Return the relative shares of the next step, by rank."""
        return self._schedule.planned_at(self.loader.position.step).shares

    def tell_epochs(self, total: int) -> None:
        """Report how many epochs the script trains in all."""
        self.calls.epochs = total
        self._tell(epochs=max(total, 0))

    def _tell(self, **changed: float) -> None:
        """Report what changed of what the controller knows of the script."""
        if self._session.link is not None and self._prepared is not None:
            for name, value in changed.items():
                setattr(self._prepared, name, value)
            self._session.link.outbox.add(prepared=self._prepared)

    @property
    def learning_rate_factor(self) -> float:
        """Return the factor of the step under way; between two epochs that of the last step."""
        if self._session.probe is not None:
            return self._session.probe.learning_rate_factor
        batch = self.loader.current
        step = batch.step if batch is not None else max(self.loader.position.step - 1, 0)
        return self._schedule.planned_at(step).learning_rate_factor

    def statistics(self) -> Mapping[str, float]:
        """Return what the strategy measured since the view began."""
        return self._boundary.statistics()

    def finish(self) -> None:
        """All epochs are done: wait until every rank has come here, then a last checkpoint, which all wait for."""
        self.succession.abandon("the script left its loop over the loader")
        self._boundary.run(last=True)
        self.state.change_begins()
        with self._losses.leaves_if_lost():
            self._current.driver.flush(Meeting.END)
            if self._session.group is not None:
                if self._part is None:
                    self.calls.model.level(self._session.group)
                self._session.group.barrier()
        torch.clear_autocast_cache()
        self.calls.training_ended = True
        self._current.driver.leave()
        self._reporter.finish()
        self.tell_trained()
        with self._losses.leaves_if_lost():
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
        self._current.driver.close()

    # --- the views of the run

    def _known(self) -> Agreed:
        """Return what holds before the first agreement of a view."""
        return Agreed(self._schedule.newest_contiguous(), False)

    def _start_driver(self, position: Position, origin: Origin | None) -> None:
        self._current.driver.start(position, self.loader.share, origin)
        if self._session.link is not None:
            self._session.link.outbox.links_so_far = self._links

    def _begin_view(self, position: Position, recovered: Recovered | None, origin: Origin | None) -> None:
        """Collective: go on with other members, from the state that all have alike, and `origin` beside it, or from
        what all have in memory. Raises PeerLost, CheckpointError."""
        self.state.memory.close()
        self._current.driver.close(followed=True)
        if recovered is not None:
            resumed = Resumed(recovered.checkpoint, recovered.own)
            self.state.go_back(resumed)
            origin = resumed.origin(self._session)
        if origin is not None:
            self.state.between_views(self._current.driver, origin)
        changes = registry.of(self._session.strategy) is not self._begun
        try:
            self._begin_driver(position, recovered, origin)
        except AtollError:
            self._current.driver.close(followed=True)
            if origin is not None:
                self.state.between_views(self._current.driver, origin)
            elif changes:
                self.state.stays_replica(self._current.driver)
            raise
        self.state.view_begun()
        if changes:
            self._begun, self._begun_by = self._built, self._session.strategy
            self._tell(shared_bytes=self.state.bytes.shared, own_bytes=self.state.bytes.own)

    def _begin_driver(self, position: Position, recovered: Recovered | None, origin: Origin | None) -> None:
        if self._session.group is not None and self._part is None:  # of stages the engine does
            self._session.group.broadcast_tensors(list(self._model.buffers()))
        agreed = self._known()
        with unfrozen(self._trained):
            self._learned[self._built.name] = self._current.driver.learned
            self._current.driver = self._build(agreed)
        self._built = registry.of(self._session.strategy)
        self._current.agreed = agreed
        self.passes.begin_view()
        self._divided.abort()
        self._plans.start()
        self._carried.go_back()
        self._counted.forget()
        generation = None if recovered is None else recovered.generation
        self.state.begin_view(self._current.driver, position.step, generation, is_other=self._built is not self._begun)
        with unfrozen(self._trained):
            self._start_driver(position, origin)

    def _build(self, agreed: Agreed) -> StepDriver:
        """Build the driver of the session's strategy; if that refuses the script only now, of the one before.

        It refuses on every rank alike: the script is the same."""
        session, chosen = self._session, registry.of(self._session.strategy)
        try:
            return build_driver(self._step_parts, agreed, self._engine_parts, self._learned.get(chosen.name))
        except BadInput as error:
            if chosen is self._begun:
                raise
            session.strategy, session.refusal = self._begun_by, " ".join(str(error).split())
        learned = self._learned.get(self._begun.name)
        return build_driver(self._step_parts, agreed, self._engine_parts, learned)

    def _why_not_in_place(self) -> str | None:
        return self._current.driver.why_not_in_place

    def _refuses(self, settings: StrategySettings) -> str | None:
        return why_refused(settings, self._script)

    def _tolerates_loss_mid_step(self) -> bool:
        return self._current.driver.tolerates_loss_mid_step

    def _rewind(self, step: int) -> bool:
        return self._current.driver.rewind(step)

    # --- callbacks of the loader, strategies and optimizers

    def _at_boundary(self) -> None:
        self._boundary.run()
        if self._density is not None and (density := self._density.take()) is not None:
            self._tell(gradient_density=density)
            if self._timing is not None:
                self._timing.report_density(density)
            self._density = None

    def _handed_out(self) -> None:
        """Note what the step of the batch needs from its plan, as the script gets the batch."""
        torch.clear_autocast_cache()  # the boundary may have changed weights: others' updates, a restored state
        batch = self.loader.current
        assert batch is not None
        if batch.number <= 1:  # the largest of its passes
            self._peak_memory.begin(batch.local)
            if self._session.link is not None:
                self._session.link.trains(batch.local)
        if not self._without_effect():
            self._divided.begin(first=batch.number <= 1, last=batch.number in (0, batch.passes))
            self.passes.local = self._divided.partial
            if self._divided.partial:
                self._current.driver.expect_local()
        self.passes.muted = self._muted()
        self.passes.params = self._schedule.planned_at(batch.step).params
        self.passes.learning_rate_factor = self.learning_rate_factor
        self._clock.handed_out()

    def _links_busy(self, busy: bool) -> None:
        """Pause copies of checkpoints while training fills the links. May be called by any thread."""
        if busy:
            self.state.memory.pause()
        else:
            self.state.memory.resume()

    def _links(self) -> list[LinkSample]:
        """Return the traffic of connections, with checkpoint copies on them. May be called by any thread."""
        samples, copied_bytes = self._current.driver.coordination.links(), self.state.memory.copied_beside()
        for sample in samples:
            sample.copied_bytes = copied_bytes.get(sample.peer, 0)
        return samples

    def _open_pass(self) -> None:
        self._current.driver.begin_from_hook()

    def _own(self) -> Agreed:
        return self._boundary.own()

    def _tell_batches(self, batches: int) -> None:
        self._tell(batches_per_update=batches)

    def _without_effect(self) -> bool:
        """Return True if nothing of what the script does counts, so that a GradScaler learns nothing from it."""
        return self.succession.member.aborted is not None

    def _update_left_out(self, optimizer: torch.optim.Optimizer) -> None:
        self._updates.left_out(optimizer)

    def _peer_lost(self, error: AtollError) -> None:
        self._losses.abort_step(error)
