"""Moves a worker from one view of its run into the next, with its process, model, optimizers, loader and graphs.

A worker leaves a view because a peer was lost inside a step, or at a step boundary that all members agree on
(`proposed`, `leave`). It then meets the members of the next view. They choose a recovery policy (`recovery/choice.py`),
which gives all of them one state, and build the strategy's exchange anew.

A worker that joins is in no view until the first one admits it (`join_run`). It receives all state, and gives none. A
worker of an older view can complete no step while the others meet in a newer one, so it never has a later state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from atoll.agent.runtime.agent_link.link import AgentLink
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
from atoll.agent.runtime.data.sampler import Position, after
from atoll.agent.runtime.membership.aborted_step import MAX_IGNORED_PASSES, AbortedStep
from atoll.agent.runtime.membership.member_state import MemberState, PreparedObjects
from atoll.agent.runtime.membership.membership_view import MembershipView, strategy_from_wire, view_from_wire
from atoll.agent.runtime.membership.recovery.state_recovery import StateRecovery
from atoll.agent.runtime.membership.session_membership import enter_membership, return_to_membership
from atoll.agent.runtime.membership.transition.membership_reporter import MembershipReporter
from atoll.agent.runtime.model.durable import Handover, Origin
from atoll.agent.runtime.plans.planned_step import PlannedStep, planned_from_wire
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.agent.runtime.session.out_of_memory import OutOfMemory
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.optimizers.hollow_steps import why_not_undoable
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.agent.runtime.transport.meeting import join_again
from atoll.agent.runtime.transport.process_groups import Group
from atoll.agent.runtime.transport.relayed_links import RelayedLinks
from atoll.errors import AtollError, BadInput, CheckpointError, DeadlineExceeded, PeerLost
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings
from atoll.v1 import agents_pb2
from atoll.v1.common_pb2 import (
    VIEW_STAGE_BROKEN,
    VIEW_STAGE_FAILED,
    VIEW_STAGE_FORMING,
    VIEW_STAGE_JOINING,
    VIEW_STAGE_READY,
    VIEW_STAGE_TRAINING,
    VIEW_STAGE_UNABLE,
    Plan,
)

MAX_WAIT_FOR_VIEW_S: Final = 120.0
"""The longest wait, in seconds, of a worker without a view for the next one or for a stop."""
MAX_WAIT_FOR_ADMISSION_S: Final = 600.0
"""The longest wait, in seconds, of a joiner for its first view. Meanwhile the members train, may be in a long step, and
hand over what they have not sent."""
MAX_ABORT_S: Final = 5.0
"""The longest time, in seconds, in which an aborted collective may return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeControl:
    """The calls with which a view transition controls the strategy's exchange of a step."""

    rebuild: Callable[[Position, Recovered | None, Origin | None], None]
    """Build the exchange for the members that the session names, from this position on. The state is that of the
    generation, if there is one, and the origin beside it. Collective; raises PeerLost, CheckpointError."""
    why_not: Callable[[], str | None]
    """Return why the strategy cannot leave its members for others; None if it can."""
    tolerates_loss_mid_step: Callable[[], bool]
    """Return whether the strategy completes a step in which a member is lost."""
    refuses: Callable[[StrategySettings], str | None]
    """Return why the script does not allow a strategy; None if it does. The same on every rank."""
    rewind: Callable[[int], bool] | None
    """Undo the updates of this rank's stage after a step; None unless the model is in stages."""


class ViewTransition:
    """Used by the training thread alone, but for `_on_view`."""

    def __init__(
        self,
        session: Session,
        prepared: PreparedObjects,
        state: StateKeeper,
        schedule: PlanSchedule,
        exchange: ExchangeControl,
    ) -> None:
        self._session, self._prepared, self._schedule, self._exchange = session, prepared, schedule, exchange
        self._loader, self._state = prepared.loader, state
        self.member = MemberState(session, prepared, state)
        self._reporter = MembershipReporter(session)
        self._launched = session.place
        self._proposed: dict[int, agents_pb2.View] = {}  # by number, since the last view began
        self._first_step = -1  # of this view that the worker trains
        self._first_step_at_s = self._step_s = 0.0  # _step_s: mean duration of this view's steps
        if (link := session.link) is not None and link.makes_views:
            link.on_view = self._on_view
        if session.joins:
            self._reporter.report(VIEW_STAGE_JOINING, 0)

    @property
    def possible(self) -> bool:
        """True if the run may continue in place at all."""
        return self._session.link is not None and self._session.link.makes_views

    @property
    def broken(self) -> AbortedStep | None:
        """The step that a loss aborted; until the next view begins, what the script does has no effect."""
        return self.member.aborted

    def lose(self, error: AtollError, *, mid_step: str | None) -> None:
        """Abort the step, because a peer is lost in it. Does not return if the run cannot continue without it.

        mid_step: the reason, if the present step cannot be aborted."""
        if self.broken is not None:
            return
        self._reporter.begin_times()
        self._end_group()
        if (why := mid_step or self._why_not_undoable()) is not None:
            self._unable(why, error)
        self.member.abort_step()
        overflow_batch = error.batch if isinstance(error, OutOfMemory) else 0
        self._reporter.report(
            VIEW_STAGE_BROKEN, self.member.boundary_step, reason=str(error), overflow_batch=overflow_batch
        )

    def can_abort(self) -> bool:
        """Return whether a step can be aborted and trained again in a next view."""
        return self.possible and self.broken is None and self._why_not_undoable() is None

    def unable(self, why: str, error: AtollError) -> None:
        """Report that the run cannot continue in place after this loss. The caller leaves."""
        if self.possible:
            reason = why if why in str(error) else f"{why}: {error}"
            self._reporter.report(VIEW_STAGE_UNABLE, self.member.boundary_step, reason=reason)

    def at_boundary(self, *, pending: bool) -> bool:
        """Enter the next view where that is due. pending: gradients wait for an update.

        Returns whether the following batch has no effect, because the script's update is still to come."""
        newest = self._newest()
        if self.broken is None and (newest is None or newest.at_boundary or self._next_epoch_suits(newest)):
            return False
        if self.broken is None and pending:
            self.lose(PeerLost("a newer view came"), mid_step=None)
        if self.broken is None or self.broken.updated:
            self._enter_next()
            return False
        self.broken.passes += 1
        if self._loader.batches_left == 0 or self.broken.passes > MAX_IGNORED_PASSES:
            self.abandon("gradients wait for an update that does not come before the epoch's end")
        return True

    def _next_epoch_suits(self, newest: agents_pb2.View) -> bool:
        """Return whether a view with joiners waits for the next epoch: they were not in the one that ends."""
        return self._loader.batches_left == 0 and not all(one.has_state for one in newest.members)

    def lost_at_boundary(self, *, pending: bool) -> bool:
        """Enter the next view after `lose` was called between two steps; otherwise as `at_boundary`."""
        if self.broken is not None:
            self.broken.updated = not pending
        return self.at_boundary(pending=pending)

    def abandon(self, why: str) -> None:
        """Leave if the worker has no view to continue in, because the script does something else than its batches.

        An aborted pass cannot be trained again then, and a joiner has no peers yet."""
        if self.broken is not None:
            self._unable(why, PeerLost("a peer was lost"))
        if self.member.joins:
            self._unable(why, PeerLost("this worker is in no view yet"))

    # --- without a loss

    def join_run(self) -> None:
        """Wait to be admitted into a view, and take the state of its members. Before the script's loop."""
        if not self.member.joins:
            return
        if (why := self._exchange.why_not() or self._why_not_undoable()) is not None:
            self._unable(why, PeerLost("this worker cannot join"))
        self._reporter.report(VIEW_STAGE_READY, 0)
        self._enter_view(self._wait_for_view(self._session.view))

    def proposed(self) -> int:
        """Return this rank's proposal for the agreement of a step: the newest view, if it is later than its own and
        begins at a boundary; otherwise 0."""
        newest = self._newest()
        if newest is None or not newest.at_boundary or self.broken is not None:
            return 0
        return self._proposed.setdefault(newest.view, newest).view

    def keeps_unsent(self, number: int) -> bool:
        """Return whether, in a view that all have proposed, each rank keeps what it has not sent."""
        return self._proposed[number].keeps_unsent

    def changes_strategy(self, number: int) -> bool:
        """Return whether a view that all have proposed trains by another strategy, which the script allows."""
        wanted = strategy_from_wire(self._proposed[number])
        return wanted is not None and self._is_other(wanted) and self._exchange.refuses(wanted) is None

    def _is_other(self, settings: StrategySettings) -> bool:
        return registry.of(settings) is not registry.of(self._session.strategy)

    def leave(self, number: int, handed_over: Handover | None) -> None:
        """Leave for a view that all ranks have proposed, at a boundary at which all do.

        handed_over: the state beside model and optimizer, if there is any."""
        self._reporter.begin_times()
        self.member.handed_over = handed_over
        self._state.stands(self._loader.position)
        self._end_group()
        self._reporter.mark_time("aborted_s")
        self._enter_view(self._proposed[number])

    def trains(self, step: int) -> None:
        """Report a boundary of training."""
        if self.possible:
            if self._first_step < 0:  # the view that it was launched with
                self._first_step, self._first_step_at_s = step, time.monotonic()
            trained = self._first_step < step
            if trained:
                self._step_s = (time.monotonic() - self._first_step_at_s) / (step - self._first_step)
            self._reporter.report_training(
                VIEW_STAGE_TRAINING,
                step,
                trained,
                takes_in=self._takes_in,
                tolerates_loss_mid_step=self._exchange.tolerates_loss_mid_step(),
            )

    def _takes_in(self) -> bool:
        """Return whether joiners may come. A joiner does not know where a model was cut into stages."""
        whole_model = self._exchange.rewind is None
        return whole_model and self._exchange.why_not() is None and self._why_not_undoable() is None

    def _why_not_undoable(self) -> str | None:
        return why_not_undoable(self._prepared.optimizers, self._prepared.tracked)

    # --- the next view

    def _enter_next(self) -> None:
        """Enter the next view at a boundary. Does not return if there is none for this worker."""
        if self.broken is None:
            self._reporter.begin_times()
            self._state.stands(self._loader.position)
            self._end_group()
            self._reporter.report(VIEW_STAGE_BROKEN, self.member.boundary_step, reason="a newer view came")
        self._reporter.mark_time("aborted_s")
        self._enter_view(self._wait_for_view(self._session.view))

    def _enter_view(self, wire: agents_pb2.View) -> None:
        """Enter this view; if it cannot be formed, one of those after it."""
        if self.member.joins:
            self._reporter.begin_times()
        while True:
            self._reporter.mark_time("told_s")
            tried, before = wire.view, replace(self._session)
            try:
                self._form(view_from_wire(wire, self._link.id.rank, self._launched))
            except (PeerLost, DeadlineExceeded) as error:
                self._end_group()
                if not self._has_news(tried):  # the next view is tried anyway
                    self._reporter.report(VIEW_STAGE_FAILED, self.member.boundary_step, view=tried, reason=str(error))
            except (BadInput, CheckpointError) as error:
                self._end_group()
                return_to_membership(self._session, before)  # what it saves is of that view
                self._unable(str(error), error)
            else:
                return
            wire = self._wait_for_view(tried)

    def _wait_for_view(self, tried: int) -> agents_pb2.View:
        """Return a view newer than `tried` once it is known. Leaves on a stop, and where no view comes in time."""
        link = self._link
        most_s = MAX_WAIT_FOR_ADMISSION_S if self._reporter.awaits_admission else MAX_WAIT_FOR_VIEW_S
        if not link.wait_for(lambda: self._has_news(tried), most_s):
            self._leave(PeerLost(f"no newer view than {tried} came within {most_s:.0f} s"))
        if link.stop is not None:
            self._leave(PeerLost(f"asked to stop while it waited for the view after {tried}: {link.stop.reason}"))
        assert link.newest_view is not None
        return link.newest_view

    def _has_news(self, tried: int) -> bool:
        """Return whether a view newer than `tried`, or a stop, is known."""
        newest, rank = self._link.newest_view, self._link.id.rank
        if newest is None or newest.view <= tried:
            return self._link.stop is not None
        is_member = any(one.member.rank == rank for one in newest.members)
        return self._link.stop is not None or is_member or not self._reporter.awaits_admission

    def _form(self, view: MembershipView) -> None:
        """Meet the members, recover one state and begin to train in the view.

        Raises PeerLost or DeadlineExceeded where a member is missing, BadInput or CheckpointError where this worker
        cannot train in the view."""
        if view.place is None:
            self._state.shutdown.left_out(view.reason)
        self._reporter.report(VIEW_STAGE_FORMING, self.member.boundary_step, view=view.number)
        old_world_size = self._session.place.world_size
        group = self._meet(view, view.place.rank)
        if group is not None and not all(view.has_state):
            self._check_alike(group, view.has_state)
        counts = view.has_state[view.place.rank] and self.member.is_whole
        recovery = StateRecovery(self.member, view.has_state, counts=counts, rewind=self._exchange.rewind)
        outcome = recovery.recover(self._step_s, old_world_size)
        position = outcome.position
        self._take_strategy(view, are_replicas=not recovery.keeps_rank_state)
        self._schedule.begin_view(view.place.world_size, view.plan.id, self._planned(view), position.step)
        if self.member.joins:
            if 0 < self._loader.samples <= position.consumed:  # a stream's length is not known
                raise BadInput("the others are between two epochs, where nobody joins")
            self._loader.join(position, view.place.rank)
        else:
            self._loader.rewind(position, view.place.rank)
        origin = outcome.origin
        if outcome.generation is None and origin is None:
            origin = self._handed_over_origin(view.place.rank, sum(view.has_state))
        self._exchange.rebuild(self._loader.position, outcome.generation, origin)
        self.member.begun_view()
        self._proposed.clear()
        self._first_step, self._first_step_at_s = position.step, time.monotonic()
        self._reporter.mark_time("agreed_s")

    def _take_strategy(self, view: MembershipView, *, are_replicas: bool) -> None:
        """Train by the view's strategy, if the script allows it.

        are_replicas: no member brings state of its own, which the strategy before alone understands. Otherwise that
        one stays, and the controller proposes the change again."""
        session, wanted = self._session, view.strategy
        session.refusal = ""
        if wanted is None or not self._is_other(wanted):
            session.plans_of_another = False
        elif (why := self._exchange.refuses(wanted)) is not None:
            session.refusal = why
        elif are_replicas or self.member.joins:
            session.strategy, session.plans_of_another = wanted, False
            self.member.strategy_step = self.member.boundary_step

    def _planned(self, view: MembershipView) -> PlannedStep:
        """Return the view's first plan. It has no parameters if they are of another strategy than this worker's."""
        plan = Plan()
        plan.CopyFrom(view.plan)
        if view.strategy is not None and self._is_other(view.strategy):
            plan.strategy_params = ""
        return planned_from_wire(plan, registry.of(self._session.strategy))

    def _meet(self, view: MembershipView, rank: int) -> Group | None:
        """Connect to the members of the view, and make the session's membership that of the view."""
        session = self._session
        assert view.place is not None
        session.links = RelayedLinks(view.members, rank, self._link.passage)
        group = join_again(
            view.place,
            view.port,
            session.device,
            within_s=view.meet_s if view.has_state[rank] else MAX_WAIT_FOR_ADMISSION_S,
            given_up=lambda wait_s: self._link.wait_for(lambda: self._has_news(view.number), wait_s),
            links=session.links,
        )
        enter_membership(session, view, view.place, group)
        self._reporter.mark_time("met_s")
        if group is not None:  # over thin links state takes minutes; the controller leaves out a silent member
            group.expect_answers_within(session.collective_timeout_s)
        return group

    def _handed_over_origin(self, rank: int, takers: int) -> Origin | None:
        """Return this rank's part of what was handed over. A joiner gets only what all ranks share."""
        if self.member.handed_over is not None:
            return self.member.handed_over.for_rank(rank, takers)
        resumed = self._state.resumed if self.member.joins else None
        origin = resumed.origin(self._session) if resumed is not None else None
        return replace(origin, own=()) if origin is not None else None

    def _check_alike(self, group: Group, has_state: Sequence[bool]) -> None:
        """Check that joiners have prepared the same as the others. Collective.

        Raises PeerLost on the others, and BadInput on a joiner that differs."""
        likeness = self._prepared.likeness
        rows = group.gather_rows(list(likeness.values()))
        first = has_state.index(True) if any(has_state) else 0
        for what, theirs, own in zip(likeness, rows[first], rows[group.rank], strict=True):
            if theirs != own:
                raise BadInput(f"{what} differs from the other workers'; every rank must run the same script")
        if other := [rank for rank, row in enumerate(rows) if row != rows[first]]:
            raise PeerLost(f"rank {other[0]} of the view prepared something else")

    # --- leaving

    def _end_group(self) -> None:
        """End the collectives of the view for good."""
        group = self._session.group
        if group is not None and not group.close_within(MAX_ABORT_S):
            late = PeerLost(f"a collective did not come back within {MAX_ABORT_S:.0f} s of being aborted")
            self._unable(str(late), late)

    def _unable(self, why: str, error: AtollError) -> NoReturn:
        """Report that the run cannot continue in place, and leave."""
        self.unable(why, error)
        self._leave(PeerLost(why if why in str(error) else f"{error}; it cannot continue in place: {why}"))

    def _leave(self, error: PeerLost) -> NoReturn:
        """End this worker; it saves what is whole."""
        batch = self._loader.current  # None: the loader was rewound, and no batch was taken since
        self._state.shutdown.lost(error, self._loader.position.step, after(batch) if batch is not None else None)

    def _on_view(self, view: agents_pb2.View) -> None:
        """Abort waits for peers that a newer view leaves out. Called by the link's thread."""
        group = self._session.group
        if view.view > self._session.view and not view.at_boundary:
            if group is not None:
                group.abort()
            self._state.shutdown.exchange.abort("a newer view came")

    def _newest(self) -> agents_pb2.View | None:
        """Return the newest view that is newer than the worker's own."""
        newest = self._link.newest_view if self._session.link is not None else None
        return newest if newest is not None and newest.view > self._session.view else None

    @property
    def _link(self) -> AgentLink:
        assert self._session.link is not None
        return self._session.link
