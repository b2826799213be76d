"""The boundary between two steps: agree with the other ranks, report the step that is over, keep whole states.

Each boundary does this in order: it enters a new view if one is due, reports the step, agrees on plans and stops,
brings the weights to where the next step needs them, leaves the view if that was agreed, and starts checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.agent.runtime.channel.agreement import Agreed
from atoll.agent.runtime.channel.arriving import Plans
from atoll.agent.runtime.membership.transition.view_transition import ViewTransition
from atoll.agent.runtime.model.durable import Handover
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.agent.runtime.session.step_timing import StepTiming
from atoll.agent.runtime.step.backward.unapplied_gradients import UnappliedGradients
from atoll.agent.runtime.step.collective_calls import CollectiveCalls
from atoll.agent.runtime.step.drivers.coordination import StepNumbers
from atoll.agent.runtime.step.drivers.step_driver import CurrentView
from atoll.agent.runtime.step.measures.clock import Lap
from atoll.agent.runtime.step.measures.non_finite import NonFinite
from atoll.agent.runtime.step.measures.peak_memory import PeakMemory
from atoll.agent.runtime.step.peer_loss import PeerLossHandler
from atoll.agent.runtime.step.state.randomness import seed_step
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.agent.runtime.step.state.step_reporter import Silent, StepReporter
from atoll.agent.runtime.step.update_hooks import UpdateHooks
from atoll.errors import BadInput, PeerLost


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryParts:
    """The parts of a training that take part in a boundary."""

    current: CurrentView
    schedule: PlanSchedule
    plans: Plans
    state: StateKeeper
    succession: ViewTransition
    calls: CollectiveCalls
    updates: UpdateHooks
    carried: UnappliedGradients
    losses: PeerLossHandler
    non_finite: NonFinite
    peak_memory: PeakMemory
    reporter: StepReporter | StepTiming | Silent


class Boundary:
    """Used by the training thread alone."""

    def __init__(self, parts: BoundaryParts) -> None:
        self._parts, self._current = parts, parts.current
        self._step = parts.current.driver.parts
        self._passes, self._loader, self._clock = self._step.passes, self._step.loader, self._step.clock
        self._session = self._step.session

    def run(self, *, last: bool = False) -> None:
        """Call before the loader slices a batch, and after the last batch of an epoch. last: no step follows."""
        if self._passes.open:
            raise BadInput("the loader was asked for the next batch in the middle of a backward pass")
        self._step.evaluated.refuse_training("the next batch")
        lap = self._clock.boundary_begins()
        self._parts.updates.at_boundary()
        if not last and self._parts.succession.at_boundary(pending=self._passes.gradients_pending):
            self._clock.boundary_ends()
            return
        self._end_step(lap)
        self._advance_trial(self._loader.position.step)
        if self._agree_again_if_lost(last=last):
            self._clock.boundary_ends()
            return
        step = self._loader.position.step
        if self._session.link is not None:
            self._session.link.step, self._session.link.plan = step, self._parts.schedule.plan_at(step)
            if last or not self._loader.batches_left:
                self._session.link.trains(0)  # memory that runs out in an evaluation says nothing of the batch
        self._parts.succession.trains(step)
        if not self._passes.gradients_pending:  # while accumulating, the last whole update is what counts
            self._parts.carried.whole()
            self._keep_state(step, last=last)
        seed_step(self._session.seed, self._session.place.rank, step)
        self._passes.muted = self._step.dry_run()
        self._clock.boundary_ends()

    def own(self) -> Agreed:
        """Return what this rank proposes to the others."""
        self._parts.plans.take()
        stop = (link := self._session.link) is not None and link.stop is not None
        return Agreed(
            self._parts.schedule.newest_contiguous(),
            stop,
            self._parts.state.memory.progress(),
            self._parts.succession.proposed(),
        )

    def statistics(self) -> Mapping[str, float]:
        """Return what the strategy measured since the view began."""
        driver = self._current.driver
        return driver.coordination.statistics(driver.sent_bytes())

    def _end_step(self, lap: Lap) -> None:
        """Report the step that is over, if it was one that counts."""
        batch, driver = self._loader.current, self._current.driver
        metrics = driver.coordination.take_metrics(driver.sent_bytes())
        numbers = StepNumbers(*driver.exchange_times(), metrics)
        if batch is None:
            return  # what was waited for between two epochs is of no step
        if self._step.dry_run.end_rehearsal():
            if self._passes.gradients_pending:  # the script counts otherwise than in the run before: no update
                for parameter in self._step.model.parameters():
                    parameter.grad = None
                self._passes.gradients_pending = False
            return
        driver.coordination.agreement.batch_over()
        self._parts.reporter.report(
            batch,
            lap,
            plan=self._parts.schedule.plan_at(batch.step),
            norms=self._passes.norms,
            numbers=numbers,
            memory=self._parts.peak_memory.end_step(),
            non_finite=self._parts.non_finite.end_step(batch.step),
        )

    def _advance_trial(self, step: int) -> None:
        """Judge a profile's trial once it has trained enough, with the same model on every rank; then end the run."""
        probe = self._session.probe
        if probe is None:
            return
        if probe.timing is not None and (batch := probe.timing.take_next_batch()) is not None:
            schedule = self._parts.schedule
            planned = replace(schedule.planned_at(step), total_batch=batch)
            schedule.add(schedule.newest_contiguous() + 1, step, planned)
        if probe.trained(step) and not self._passes.gradients_pending:
            statistics = self.statistics()  # before what follows, which is none of it
            self._parts.calls.synchronize()
            probe.judge(step, self._step.model, statistics)
        if probe.over(step):
            self._parts.state.shutdown.tried(probe)

    def _agree_again_if_lost(self, *, last: bool) -> bool:
        """Agree with the ranks that are left, and leave for another view if that was agreed.

        Returns True if the following batch has no effect, because the script's update is still to come."""
        while True:
            try:
                if (lost := self._current.driver.lost) is not None:
                    raise PeerLost(lost)
                self._agree(self._loader.position.step)
                if not last and not self._passes.gradients_pending:
                    self._leave_view()
            except PeerLost as error:
                driver = self._current.driver
                driver.coordination.check_alike()
                in_place = driver.needs_rollback or driver.step_is_atomic
                if driver.step_is_atomic:
                    self._parts.state.stands(self._loader.position)
                if last or not in_place:
                    self._parts.succession.unable("it was lost outside of a step", error)
                    self._parts.losses.leave(error)
                self._parts.losses.abort_step(error)
                if self._parts.succession.lost_at_boundary(pending=self._passes.gradients_pending):
                    return True
            else:
                return False

    def _agree(self, step: int) -> None:
        """Take up what all ranks know alike, and bring the weights to where this boundary needs them."""
        driver = self._current.driver
        self._current.agreed = agreed = driver.coordination.agree(self.own())
        # Now: how large the next batch is decides whether this is an epoch's end.
        self._parts.plans.agree(max(step - 1, 0), agreed.plan_id)
        due = not self._passes.gradients_pending and (agreed.stop or self._parts.state.saver.due(step))
        driver.boundary(wait=due or not self._loader.batches_left)
        self._clock.waited(driver.waited(), at_boundary=True)

    def _leave_view(self) -> None:
        """Leave for the next view, at a boundary whose update is whole and if all ranks know of it. Raises PeerLost."""
        agreed, driver = self._current.agreed, self._current.driver
        if agreed.view <= self._session.view or agreed.stop or not self._loader.batches_left:
            return  # after an epoch's last batch the script does what needs all who were there
        self._parts.state.change_begins()
        handed_over: Handover | None = None
        changes = self._parts.succession.changes_strategy(agreed.view)
        if driver.needs_rollback:
            keeps = self._parts.succession.keeps_unsent(agreed.view) and not changes
            handed_over = driver.hand_over(self._loader.position.step, keeps_unsent=keeps)
            if changes:
                self._parts.state.become_replica(driver, handed_over, self._loader.share)
                handed_over = None
        self._parts.succession.leave(agreed.view, handed_over)

    def _keep_state(self, step: int, *, last: bool) -> None:
        """Begin the checkpoints of a whole update where they are due, and carry out a stop that was agreed."""
        state, agreed, driver = self._parts.state, self._current.agreed, self._current.driver
        state.whole(
            self._loader.position,
            agreed,
            snapshot=not self._step.dry_run.rehearsing,  # what was resumed from is on disk already
            # At its end another model may be what training ended with.
            to_disk=not driver.flush_changes or (self._loader.batches_left > 0 and not last),
        )
        if agreed.stop:
            self._parts.reporter.finish()
            state.shutdown.drained(step)
        state.released()
