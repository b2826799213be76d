"""Takes a worker from one view of its run into the next, with its process, model, optimizers, loader and graphs.

The state that counts is that of the last boundary whose update was whole. Ranks may be one update apart there, and no
more: an update needs every rank's part of the gradient, and who is ahead by one waits for the others' next part. So who
has made the last update has the state of all, and who has not, for its part of that step never came back, takes it
from there (`_level`). Who is not of a view that all have met in can complete no step, and so has no later state.

A worker that joins is in no view until it is taken into one (`join_run`); it takes all state from the others, and
gives none. Where nobody is lost, all leave their view at a step boundary that their agreement finds (`proposed`,
`leave`)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NoReturn

import torch
from torch import nn

from atoll.agent.runtime.agent_link.link import AgentLink
from atoll.agent.runtime.api.inputs import Likeness
from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.checkpoints.handing_over import hand_over
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
from atoll.agent.runtime.checkpoints.model_state import module_state
from atoll.agent.runtime.checkpoints.resume import Resumed, position_of
from atoll.agent.runtime.checkpoints.snapshot import Tracked
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.data.sampler import Position, after
from atoll.agent.runtime.membership.aborted_step import LONGEST_PASSES, AbortedStep, why_not
from atoll.agent.runtime.membership.continue_without_rollback import go_on_as_they_are
from atoll.agent.runtime.membership.membership_reporter import Standing
from atoll.agent.runtime.membership.standpoints import newest, standpoints
from atoll.agent.runtime.membership.view import View, read_view
from atoll.agent.runtime.step.optimizers.as_one import as_one
from atoll.agent.runtime.step.plans.planned_step import planned_from_wire
from atoll.agent.runtime.step.plans.schedule import PlanSchedule
from atoll.agent.runtime.step.state.durable import HandedOver, Origin
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.agent.runtime.transport.meeting import join_again
from atoll.agent.runtime.transport.process_groups import Group, gathered_rows
from atoll.agent.runtime.transport.relayed_links import RelayedLinks
from atoll.errors import AtollError, BadInput, CheckpointError, DeadlineExceeded, PeerLost
from atoll.strategies import registry
from atoll.v1 import agents_pb2
from atoll.v1.common_pb2 import (
    LEVEL_INFO,
    LEVEL_WARNING,
    VIEW_STAGE_BROKEN,
    VIEW_STAGE_FAILED,
    VIEW_STAGE_FORMING,
    VIEW_STAGE_JOINING,
    VIEW_STAGE_READY,
    VIEW_STAGE_TRAINING,
    VIEW_STAGE_UNABLE,
)

VIEW_VARIABLE: Final = "ATOLL_VIEW"
"""In the environment, beside what torchrun sets: the view that this process is in; without it, the first."""
STANDS_STILL_S: Final = 120.0
"""How long it waits for the next view, or for a stop."""
WAITS_READY_S: Final = 600.0
"""How long who joins waits to be taken in. Meanwhile the others train, may be in a long step, and hand over what they
have not sent."""
GOES_BACK_S: Final = 60.0
"""No more training than this is done again from memory: where the newest copy is older, as over thin links, the members
go on as they are, or the run starts again from the last step, without what the lost one had not sent."""
COMES_BACK_S: Final = 5.0
"""Within which collectives that were aborted come back."""


class ViewTransition:
    """Used by the training thread alone, but for `_on_view`."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Tracked],
        *,
        loader: Loader[object],
        schedule: PlanSchedule,
        state: StateKeeper,
        rebuild: Callable[[Position, Recovered | None, Origin | None], None],
        why_not: Callable[[], str | None],
        tolerates_loss_mid_step: Callable[[], bool],
        rewind: Callable[[int], bool] | None,
        likeness: Likeness,
    ) -> None:
        """rebuild: collective; makes anew what exchanges steps with the members that the session names, from this
        position on, and from this state where it is another, or with what was handed over to it. It raises PeerLost,
        CheckpointError. why_not: why the
        strategy cannot leave its members for others; None where it can. tolerates_loss_mid_step:
        whether it completes a step in which a member is lost.
        rewind: of a model in stages, of which each rank has a part: puts back what a step
        has changed, the last whole one too. likeness: of what this worker trains."""
        self._session, self._model, self._optimizers, self._tracked = session, model, optimizers, tracked
        self._loader, self._schedule, self._state, self._rebuild = loader, schedule, state, rebuild
        self._why_not, self._tolerates_loss, self._likeness = why_not, tolerates_loss_mid_step, likeness
        self._rewind = rewind
        self._strategy = registry.of(session.strategy)
        self._standing = Standing(session)
        self._launched = session.place
        self._joins = session.joins  # it has trained in no view yet
        self._proposed: dict[int, agents_pb2.View] = {}  # by number, since the last view began
        self._trains_from = -1  # the first step in this view
        self._trains_since_s = self._step_s = 0.0  # of its steps, in the mean
        self._handed_over: HandedOver | None = None  # where it left the last view at a boundary
        self._updated_to: Position | None = None  # where the update that came before a loss leads, if one did
        self.broken: AbortedStep | None = None
        """What the script does counts for nothing."""
        if (link := session.link) is not None and link.makes_views:
            link.on_view = self._on_view
        if session.joins:
            self._standing.say(VIEW_STAGE_JOINING, 0)

    @property
    def possible(self) -> bool:
        """Whether the run may go on in place at all."""
        return self._session.link is not None and self._session.link.makes_views

    def lose(self, error: AtollError, *, mid_step: str | None) -> None:
        """A peer is gone inside a step: what the script does up to its next batch counts for nothing. Returns if the
        run may go on without it; else the worker leaves. mid_step: why not, from who knows the step."""
        if self.broken is not None:
            return
        self._standing.noticed()
        self._end_group()
        if (why := mid_step or why_not(self._optimizers, self._tracked)) is not None:
            self._unable(why, error)
        batch, updated = self._loader.current, self._state.shutdown.updated
        self._updated_to = after(batch) if batch is not None and updated else None
        self.broken = AbortedStep(self._model, self._optimizers, self._state.snapshot, whole=not updated)
        self._standing.say(VIEW_STAGE_BROKEN, self._step, reason=str(error))

    def unable(self, why: str, error: AtollError) -> None:
        """This loss cannot be gone on from in place. The caller leaves."""
        if self.possible:
            reason = why if why in str(error) else f"{why}: {error}"
            self._standing.say(VIEW_STAGE_UNABLE, self._step, reason=reason)

    def at_boundary(self, *, pending: bool) -> bool:
        """Go into the next view where that is due. pending: gradients wait for an update. Returns whether the batch
        that follows is for show, because the script's update is still to come."""
        newest = self._newest()
        if self.broken is None and (newest is None or newest.at_boundary or self._next_epoch_suits(newest)):
            return False
        if self.broken is None and pending:
            self.lose(PeerLost("a newer view came"), mid_step=None)
        if self.broken is None or self.broken.updated:
            self._go_on()
            return False
        self.broken.passes += 1
        if self._loader.batches_left == 0 or self.broken.passes > LONGEST_PASSES:
            self.abandon("gradients wait for an update that does not come before the epoch's end")
        return True

    def _next_epoch_suits(self, newest: agents_pb2.View) -> bool:
        """At an epoch's end: what a script does there is not for who joins, who was not in that epoch."""
        return self._loader.batches_left == 0 and not all(one.has_state for one in newest.members)

    def lost_at_boundary(self, *, pending: bool) -> bool:
        """After `lose`, between two steps; else as `at_boundary`."""
        if self.broken is not None:
            self.broken.updated = not pending
        return self.at_boundary(pending=pending)

    def abandon(self, why: str) -> None:
        """The script does something else than to go on with its batches: a broken pass cannot be trained again, and who
        joins has nobody to do that with."""
        if self.broken is not None:
            self._unable(why, PeerLost("a peer was lost"))
        if self._joins:
            self._unable(why, PeerLost("this worker is in no view yet"))

    # --- without a loss

    def join_run(self) -> None:
        """Before the script's loop: be taken into a view, with the state of its members."""
        if not self._joins:
            return
        if (why := self._why_not() or why_not(self._optimizers, self._tracked)) is not None:
            self._unable(why, PeerLost("this worker cannot join"))
        self._standing.say(VIEW_STAGE_READY, 0)
        self._into(self._next(self._session.view))

    def proposed(self) -> int:
        """What this rank brings to the agreement of a step: the newest view, where it is later than its own and left
        for at a boundary; else 0."""
        newest = self._newest()
        if newest is None or not newest.at_boundary or self.broken is not None:
            return 0
        return self._proposed.setdefault(newest.view, newest).view

    def keeps_unsent(self, number: int) -> bool:
        """Of a view that all have proposed: whether each keeps what it has not sent, and nobody hands over."""
        return self._proposed[number].keeps_unsent

    def leave(self, number: int, handed_over: HandedOver | None) -> None:
        """At a boundary at which all ranks do, for this view, which all have proposed. handed_over: where there is
        something beside model and optimizer."""
        self._standing.noticed()
        self._handed_over = handed_over
        self._state.stands(self._loader.position)
        self._end_group()
        self._standing.came_to("aborted_s")
        self._into(self._proposed[number])

    @property
    def _takes_in(self) -> bool:
        """Who starts does not know where a model was cut into stages."""
        alike = self._rewind is None
        return alike and self._why_not() is None and why_not(self._optimizers, self._tracked) is None

    def _go_on(self) -> None:
        """At a boundary: into the next view, however many it takes. Does not return where there is none for this
        worker."""
        if self.broken is None:
            self._standing.noticed()
            self._state.stands(self._loader.position)
            self._end_group()
            self._standing.say(VIEW_STAGE_BROKEN, self._step, reason="a newer view came")
        self._standing.came_to("aborted_s")
        self._into(self._next(self._session.view))

    def _into(self, wire: agents_pb2.View) -> None:
        """That view, or where it does not come about one after it."""
        if self._joins:
            self._standing.noticed()
        while True:
            self._standing.came_to("told_s")
            tried, before = wire.view, replace(self._session)
            try:
                self._form(read_view(wire, self._link.id.rank, self._launched))
            except (PeerLost, DeadlineExceeded) as error:
                self._end_group()
                if not self._told(tried):  # else that comes next
                    self._standing.say(VIEW_STAGE_FAILED, self._step, view=tried, reason=str(error))
            except (BadInput, CheckpointError) as error:
                self._end_group()
                self._enter_again(before)  # what it saves is of that view
                self._unable(str(error), error)
            else:
                return
            wire = self._next(tried)

    def trains(self, step: int) -> None:
        """At a boundary."""
        if self.possible:
            if self._trains_from < 0:  # the view that it was launched with
                self._trains_from, self._trains_since_s = step, time.monotonic()
            trained = self._trains_from < step
            if trained:
                self._step_s = (time.monotonic() - self._trains_since_s) / (step - self._trains_from)
            self._standing.trains(
                VIEW_STAGE_TRAINING,
                step,
                trained,
                takes_in=lambda: self._takes_in,
                tolerates_loss_mid_step=self._tolerates_loss(),
            )

    # --- the next view

    def _next(self, tried: int) -> agents_pb2.View:
        """One newer than `tried`, once it is there. Leaves on a stop, and where none comes."""
        link, most_s = self._link, WAITS_READY_S if self._standing.waits else STANDS_STILL_S
        if not link.wait_for(lambda: self._told(tried), most_s):
            self._leave(PeerLost(f"no newer view than {tried} came within {most_s:.0f} s"))
        if link.stop is not None:
            self._leave(PeerLost(f"asked to stop while it waited for the view after {tried}: {link.stop.reason}"))
        assert link.newest_view is not None
        return link.newest_view

    def _told(self, tried: int) -> bool:
        """Of a newer view than that, or of a stop."""
        newest = self._link.newest_view
        newer = newest is not None and newest.view > tried and (not self._standing.waits or self._is_member(newest))
        return self._link.stop is not None or newer

    def _is_member(self, view: agents_pb2.View) -> bool:
        return any(one.member.rank == self._link.id.rank for one in view.members)

    def _form(self, view: View) -> None:
        """Raises PeerLost or DeadlineExceeded where a member is not there, BadInput or CheckpointError where this
        worker cannot train in it."""
        session = self._session
        if view.place is None:
            self._state.shutdown.left_out(view.reason)
        self._standing.say(VIEW_STAGE_FORMING, self._step, view=view.number)
        session.links = RelayedLinks(view.members, view.place.rank, self._link.passage)
        group = join_again(
            view.place,
            view.port,
            session.device,
            within_s=view.meet_s if view.has_state[view.place.rank] else WAITS_READY_S,
            given_up=lambda wait_s: self._link.wait_for(lambda: self._told(view.number), wait_s),
            links=session.links,
        )
        old_world_size = session.place.world_size
        self._enter(view, group)
        self._standing.came_to("met_s")
        if group is not None:  # over thin links state takes minutes; whom nobody hears of the controller leaves out
            group.expect_answers_within(session.collective_timeout_s)
        if group is not None and not all(view.has_state):
            self._check_alike(group, view.has_state)
        recovered: Recovered | None = None
        origin: Origin | None = None
        if self._state.shutdown.exchange.needs_rollback and not self._all_handed_over(group, view.has_state):
            try:
                recovered = self._state.newest_in_memory(self._oldest(group))
            except CheckpointError as error:
                position, origin = self._as_they_are(view, error, old_world_size)
            else:
                position = self._goes_back_to(recovered, group)
        else:
            own = self._state.snapshot.position if self.broken is not None else self._loader.position
            assert own is not None  # a boundary came before the first pass
            counts = view.has_state[view.place.rank] and (self.broken is None or self.broken.whole)
            position = self._level(own, counts=counts) if self._rewind is None else self._level_stages(own, counts)
        self._schedule.begin_view(
            view.place.world_size, view.plan.id, planned_from_wire(view.plan, self._strategy), position.step
        )
        if self._joins:
            if 0 < self._loader.samples <= position.consumed:  # of a stream nobody knows
                raise BadInput("the others are between two epochs, where nobody joins")
            self._loader.join(position, view.place.rank)
        else:
            self._loader.rewind(position, view.place.rank)
        if recovered is None and origin is None:
            origin = self._taken_over(view)
        self._rebuild(self._loader.position, recovered, origin)
        self.broken, self._joins, self._handed_over = None, False, None
        self._proposed.clear()
        self._trains_from, self._trains_since_s = position.step, time.monotonic()
        self._standing.came_to("agreed_s")

    def _goes_back_to(self, recovered: Recovered, group: Group | None) -> Position:
        if self.broken is not None:
            self.broken.put_back()
        saver = self._state.saver
        seen = gathered_rows(group, [saver.seen_step])
        saver.seen_step = max(step for (step,) in seen)  # what is on disk of later stays
        return position_of(recovered.checkpoint.header)

    def _as_they_are(self, view: View, error: CheckpointError, old_world_size: int) -> tuple[Position, Origin]:
        """Where memory has nothing to go back to, as `error` says. Raises it where members cannot go on so either."""
        found = None
        if all(view.has_state):
            if self.broken is not None and self._updated_to is None:
                self.broken.put_back()
            found = go_on_as_they_are(
                self._session,
                self._model,
                self._tracked,
                self._state,
                updated_to=self._updated_to,
                old_world_size=old_world_size,
            )
        if found is None:
            raise error
        self._stands_at(found[0])
        if self._session.place.is_main:
            text = f"{error}: the others go on from step {found[0].step} as they are, without it"
            self._session.notice(LEVEL_WARNING, text)
        return found

    def _oldest(self, group: Group | None) -> int:
        """The step that what all go back to is not to be older than, the same on all. Collective; raises PeerLost."""
        saves = self._state.saver.enabled
        worth = math.ceil(GOES_BACK_S / self._step_s) if saves and self._step_s > 0 else self._step
        rows = gathered_rows(group, [self._step, worth])
        return max(0, max(step for step, _ in rows) - max(worth for _, worth in rows))

    def _all_handed_over(self, group: Group | None, has_state: Sequence[bool]) -> bool:
        """Whether all who have state left the view before at one boundary, with what there was beside it. Collective;
        raises PeerLost."""
        step = self._handed_over.origin.step if self._handed_over is not None else -1
        steps = {row[0] for row, has in zip(gathered_rows(group, [step]), has_state, strict=True) if has}
        return len(steps) == 1 and min(steps) >= 0

    def _taken_over(self, view: View) -> Origin | None:
        """What this worker has beside model and optimizer in the view. Who joins has what all share alone."""
        assert view.place is not None
        if self._handed_over is not None:
            return self._handed_over.shared_out(view.place.rank, sum(view.has_state))
        resumed = self._state.resumed if self._joins else None
        return replace(resumed.origin(), own=()) if resumed is not None else None

    def _check_alike(self, group: Group, has_state: Sequence[bool]) -> None:
        """Who joins prepared the same as the others. Collective; raises PeerLost on them, BadInput on who did not."""
        rows = group.gather_rows(list(self._likeness.values()))
        first = has_state.index(True) if any(has_state) else 0
        for what, theirs, own in zip(self._likeness, rows[first], rows[group.rank], strict=True):
            if theirs != own:
                raise BadInput(f"{what} differs from the other workers'; every rank must run the same script")
        if other := [rank for rank, row in enumerate(rows) if row != rows[first]]:
            raise PeerLost(f"rank {other[0]} of the view prepared something else")

    def _enter(self, view: View, group: Group | None) -> None:
        session, link = self._session, self._link
        assert view.place is not None
        session.view, session.place, session.group = view.number, view.place, group
        os.environ[VIEW_VARIABLE] = str(view.number)
        session.members = view.members
        if session.keys is not None:
            keys = session.keys
            session.keys = agents_pb2.DataKeys(secret=keys.secret, volunteers=keys.volunteers, public=view.keys)
        if session.memory is not None:
            session.memory = replace(
                session.memory,
                nodes=tuple(member.node for member in view.members),
                kept_by=tuple(tuple(member.holders) for member in view.members),
            )
        link.outbox.begin_view(view.number, link.id)

    def _enter_again(self, before: Session) -> None:
        """The view that it was in."""
        for name in ("view", "place", "group", "members", "keys", "memory"):
            setattr(self._session, name, getattr(before, name))

    def _level(self, own: Position, *, counts: bool) -> Position:
        """All members have the newest state that counts; where this one goes on with it. Collective."""
        group = self._session.group
        saver = self._state.saver
        rows = standpoints(group, own, saver.seen_step, counts=counts)
        source = newest(rows)
        if source is None:
            raise BadInput("no member has the state of a whole step; it is in a checkpoint")
        behind = [rank for rank, row in enumerate(rows) if not row.counts or row.step < rows[source].step]
        if self.broken is not None:
            self.broken.put_back()
        saver.seen_step = max(row.seen_step for row in rows if row.counts)  # so that checkpoints are due on all alike
        if not behind:
            return own
        assert group is not None  # or it were behind itself
        here = group.rank
        known, _ = pack_state({"model": module_state(self._model)}) if here in behind else ({}, None)
        brief = self._handed_over is not None and self._handed_over.own_moments
        sent = hand_over(group, saver.loaded(brief_moments=brief) if here == source else None, source, behind, known)
        if sent is None:
            return own
        position = rows[source].position
        self._session.notice(LEVEL_INFO, f"rank {here} takes the state of step {position.step} from rank {source}")
        self._take_over(sent)
        return position

    def _level_stages(self, own: Position, counts: bool) -> Position:
        """All stages of all members stand at one step: where not all of the old view have made the last one whole, it
        is trained again. Nobody else may have a stage's later state. Collective; raises BadInput where a member cannot
        go back so far."""
        assert self._rewind is not None
        group, saver = self._session.group, self._state.saver
        rows = standpoints(group, own, saver.seen_step, counts=counts)
        if not all(row.counts for row in rows):
            raise BadInput("a stage has not the state of a whole step; it is in a checkpoint")
        position = min(rows, key=lambda row: row.step).position
        step = position.step
        if self.broken is not None:
            self.broken.put_back()
        if own.step > step:
            if self._tracked or not self._rewind(step):
                raise BadInput(f"another stage stands at step {step}, and this one at {own.step} cannot go back there")
            self._stands_at(position)
        saver.seen_step = min(max(row.seen_step for row in rows), step)
        return position

    def _take_over(self, sent: LoadedCheckpoint) -> None:
        resumed = self._state.resumed = Resumed(sent)
        resumed.restore(self._model, as_one(self._optimizers), self._state.snapshot.prepared)
        for name, tracked in self._tracked.items():
            resumed.restore_tracked(name, tracked)
        self._stands_at(resumed.position)

    def _stands_at(self, position: Position) -> None:
        self._state.snapshot.take(position)
        if self.broken is not None:
            self.broken = AbortedStep(self._model, self._optimizers, self._state.snapshot, whole=True)

    # --- leaving

    def _end_group(self) -> None:
        """Leave the view's collectives for good."""
        group = self._session.group
        if group is not None and not group.close_within(COMES_BACK_S):
            late = PeerLost(f"a collective did not come back within {COMES_BACK_S:.0f} s of being aborted")
            self._unable(str(late), late)

    def _unable(self, why: str, error: AtollError) -> NoReturn:
        self.unable(why, error)
        self._leave(PeerLost(why if why in str(error) else f"{error}; it cannot go on in place: {why}"))

    def _leave(self, error: PeerLost) -> NoReturn:
        batch = self._loader.current  # None: it went back, and is not there yet
        self._state.shutdown.lost(error, self._loader.position.step, after(batch) if batch is not None else None)

    def _on_view(self, view: agents_pb2.View) -> None:
        """By the link's thread: what waits for a peer that is left out is not to wait any longer."""
        group = self._session.group
        if view.view > self._session.view and not view.at_boundary:
            if group is not None:
                group.abort()
            self._state.shutdown.exchange.abort("a newer view came")

    def _newest(self) -> agents_pb2.View | None:
        """Newer than the one it is in."""
        newest = self._link.newest_view if self._session.link is not None else None
        return newest if newest is not None and newest.view > self._session.view else None

    @property
    def _link(self) -> AgentLink:
        assert self._session.link is not None
        return self._session.link

    @property
    def _step(self) -> int:
        position = self._state.snapshot.position
        return position.step if position is not None else 0
