"""The shell around `next_step`: observes every job, writes what follows, then sends it to the agents.

Runs on events and on a timer. May be killed at any line: the next pass, here or at another controller, sees the wanted
and the observed state and continues.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.deciding.given import controller_half
from atoll.controller.estimators.profile import Profile
from atoll.controller.jobs.admission.free_devices import FreeDevices, find_free, has_orphans, seats_by_job
from atoll.controller.jobs.agents.orphans import orphan_actions
from atoll.controller.jobs.agents.outbox import AgentOutbox
from atoll.controller.jobs.agents.progress import COMMIT_EVERY_S, PROFILE_EVERY_S, ProgressBoard, RunProgress
from atoll.controller.jobs.agents.sessions import AgentSessions
from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.lifecycle.reconcile_cache import QuietJobs
from atoll.controller.jobs.model.connectivity import within_reach
from atoll.controller.jobs.model.data_keys import new_seed
from atoll.controller.jobs.model.exits import is_lost
from atoll.controller.jobs.model.members import members_of
from atoll.controller.jobs.model.observed import (
    JobStep,
    ObservedDevices,
    ObservedJob,
    ObservedNode,
    ObservedPlans,
    ObservedTraining,
    ObservedViews,
    PassClock,
    ViewStage,
)
from atoll.controller.jobs.model.peer_links import PeerLinks
from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.jobs.model.strategy_in_force import strategy_of
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.jobs.records.ledger import Ledger
from atoll.controller.jobs.strategy.choosing import strategy_through_relay
from atoll.controller.jobs.volunteers.volunteers import Volunteers
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import JobPhase, Level, NodeRecord, RunRecord, WorkerExitKind
from atoll.controller.state.views import ViewState
from atoll.errors import Conflict, LeadershipLost, StoreUnavailable

logger = logging.getLogger(__name__)

PASS_INTERVAL_S: Final = 0.5
MIN_PAUSE_S: Final = 0.02
"""Least time between passes, so that a thousand agents that report at the same moment cause one pass."""
RETRY_S: Final = 0.5
MAX_STEPS_A_PASS: Final = 4
CLUSTER_EVENTS: Final = 256
RANKS_A_PASS: Final = 2000
"""Ranks whose profiles are made anew in a pass. Those of further jobs follow in the next pass, at once."""
RANKS_A_SECOND: Final = 4000
"""Ranks whose profiles are made anew in a second, so that this takes a tenth of a processor whatever the cluster's
size."""
STARTED_A_PASS: Final = 1000
"""Workers placed in a pass, after which further jobs start in the next, at once. Keys are made for each, and no agent
is served meanwhile."""


class Reconciler:
    """Reconciler of one leader epoch. It owns no task: `run` is one, and its caller cancels it."""

    def __init__(
        self,
        ledger: Ledger,
        sessions: AgentSessions,
        progress: ProgressBoard,
        peer_links: PeerLinks,
        *,
        unmeasured: Callable[[], Container[str]] = frozenset,
        node_lease_s: float,
        reveal: bool,
        removed: Callable[[str], None] = lambda job: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._progress = progress
        self._peer_links, self._unmeasured = peer_links, unmeasured
        self._node_lease_s = node_lease_s
        self._removed = removed
        self._clock = clock
        self._nudged = asyncio.Event()
        self.kept_free: Mapping[str, tuple[FreeDevice, ...]] = {}
        self._committed_s: dict[str, float] = {}
        self._free_since: dict[tuple[str, int], float] = {}
        self._present: set[str] = set()
        self._cluster_events: list[NewEvent] = []
        self._events_dropped = 0
        self._undecided: dict[str, str] = {}
        self._ranks_a_pass = self._ranks_left = RANKS_A_PASS
        self._profile_every_s = PROFILE_EVERY_S
        self._nodes: Mapping[str, ObservedNode] | None = None
        self._outbox = AgentOutbox(sessions, reveal=reveal)
        self._quiet = QuietJobs(sessions, progress)
        self._volunteers = Volunteers(ledger, sessions, self._outbox, progress, self.add_cluster_event)

    def nudge(self) -> None:
        """Make a pass soon: something happened."""
        self._nudged.set()

    def remember(self, nodes: Iterable[str]) -> None:
        """Add the nodes of an earlier leader, which neither join nor are lost yet."""
        self._present.update(nodes)

    def note_joined(self, node: NodeRecord) -> None:
        """Report a node that is new to the cluster."""
        if node.name not in self._present:
            self._present.add(node.name)
            self.add_cluster_event(_joined(node))

    def add_cluster_event(self, event: NewEvent) -> None:
        """Write an event of the cluster with the next pass. Beyond CLUSTER_EVENTS they are only counted."""
        if len(self._cluster_events) < CLUSTER_EVENTS:
            self._cluster_events.append(event)
        else:
            self._events_dropped += 1

    async def run(self) -> None:
        """Pass after pass until cancelled. Raises LeadershipLost."""
        while True:
            pause_s = PASS_INTERVAL_S
            self._nudged.clear()
            try:
                await self.once()
            except (StoreUnavailable, Conflict) as error:
                logger.warning("%s; looking again in %.1f s", error, RETRY_S)
                pause_s = RETRY_S
            await asyncio.sleep(MIN_PAUSE_S)
            try:
                async with asyncio.timeout(pause_s):
                    await self._nudged.wait()
            except TimeoutError:
                continue

    async def once(self) -> None:
        """One pass over all jobs."""
        self._sessions.end_silent()
        await self._watch_nodes()
        self._ranks_left, self._nodes = self._ranks_a_pass, None
        ranks = sum(len(s.run.members) for s in self._ledger.jobs.values() if s.run and s.job.status.phase.active)
        self._profile_every_s = PROFILE_EVERY_S * max(1.0, ranks / RANKS_A_SECOND)
        async with self._ledger.writing:
            free = self._find_free()
            live = [s for s in self._ledger.jobs.values() if not s.job.status.phase.ended or s.stale]
            live.sort(key=lambda s: (s.job.status.phase is not JobPhase.QUEUED, s.created))
            started = 0
            for state in live:
                if started >= STARTED_A_PASS and state.job.status.phase is JobPhase.QUEUED:
                    self.nudge()
                    continue
                queued = state.job.status.phase is JobPhase.QUEUED
                await self._advance_or_report(state, free)
                if queued and state.run and state.job.status.phase is JobPhase.STARTING:
                    started += len(state.run.members)
            await self._commit(live)
            removed = await self._ledger.remove_oldest()
        self._stop_orphans()
        self._volunteers.attend(self._clock())
        self._sessions.forget_lost(self._present)
        for job in removed:
            self.forget(job)

    def forget(self, job: str) -> None:
        """Drop all that is kept of a job that was removed."""
        self._progress.drop(job)
        self._committed_s.pop(job, None)
        self._quiet.forget(job)
        self._removed(job)

    async def _advance_or_report(self, state: JobState, free: FreeDevices) -> None:
        """Advance a job, and report it if that fails: a bug, or a wrong record, must not hold up the other jobs."""
        job = state.job.id
        try:
            await self._advance(state, free)
        except (StoreUnavailable, Conflict, LeadershipLost):
            raise
        except Exception as error:
            if self._undecided.get(job) != repr(error):
                self._undecided[job] = repr(error)
                logger.exception("job %s cannot be decided upon and stays as it is", job)
                text = f"job {job} stays as it is: {error}"
                self.add_cluster_event(NewEvent(kind=EventKind.NOTICE, level=Level.ERROR, cause=text))
        else:
            self._undecided.pop(job, None)

    async def _advance(self, state: JobState, free: FreeDevices) -> None:
        """Advance one job as far as it can go now, and write the notices of its workers."""
        if not self._quiet.is_quiet(state, free) or self._may_profile(state):
            await self._look(state, free)
            await asyncio.sleep(0)  # agents are served between two jobs of a thousand workers
        if state.run and state.job.status.phase is not JobPhase.QUEUED:
            notices = self._progress.take_notices(state.job.id, state.run.run)
            for i in range(0, len(notices), 32):  # a transaction carries only so many
                await self._ledger.write(state, JobStep(state.job, state.run, events=notices[i : i + 32]))

    async def _look(self, state: JobState, free: FreeDevices) -> None:
        for _ in range(MAX_STEPS_A_PASS):
            if state.stale:
                await self._ledger.reread(state.job.id)
                found = self._ledger.jobs.get(state.job.id)
                if found is None:
                    return
                state = found
            before = (state.job, state.run, state.views)
            step = next_step(self._observe(state, free), self._pass_clock())
            await self._ledger.write(state, step)
            if step.judged:
                state.judged_s = self._clock()
            if step.refused and state.plans:
                state.refused = (state.plans[-1].run, state.plans[-1].id)
            self._note_finished(state)
            for action in step.actions:
                self._outbox.act(state, action, self._clock())
            if state.job.status.phase is JobPhase.QUEUED:
                free.hold(step.held)
                if before[0].status.phase is not JobPhase.QUEUED:
                    self.nudge()  # the devices that it has just given back are free in the next pass
                return
            if before[0].status.phase is JobPhase.QUEUED and state.run:
                free.take(state.run)
            if (state.job, state.run, state.views) == before and step.plan is None:
                self._quiet.note(state, step)
                return

    async def _commit(self, live: Sequence[JobState]) -> None:
        """Write the generations in memory that are newly complete, of each job at most once in COMMIT_EVERY_S."""
        now_s, unix_s, complete = self._clock(), time.time(), []
        for state in live:
            job, run = state.job.id, state.run
            progress = self._progress.of(job, run.run) if run else None
            if not run or not progress or now_s - self._committed_s.get(job, -math.inf) < COMMIT_EVERY_S:
                continue
            if (found := progress.newly_complete(run, state.commit, unix_s)) is not None:
                complete.append(found)
                self._committed_s[job] = now_s
        await self._ledger.commit(complete)

    def _pass_clock(self) -> PassClock:
        return PassClock(self._clock(), time.time(), self._sessions.awaiting_since_s, self._node_lease_s)

    def _observe(self, state: JobState, free: FreeDevices) -> ObservedJob:
        job, run = state.job, state.run
        waiting, nodes = job.status.phase is JobPhase.QUEUED, state.seats.ranks if state.seats else ()
        may_take = waiting or (job.status.phase is JobPhase.RUNNING and free.devices and self._may_grow(state))
        kept = free.kept.get(job.id, ())
        offered = free.offered_to(job.id) if may_take else kept if kept and state.is_short else ()
        strategy = strategy_through_relay(job) if waiting else state.strategy
        found = within_reach(strategy, offered, self._sessions.records, nodes)
        offered, unreachable = tuple(found.devices), found.why
        there = [device.node for device in offered if device.node not in nodes]
        key, connected = (job.id, job.status.run), self._sessions.connected
        sessions = {name: connected[name] for name in nodes if name in connected}
        plans_sent = {name: session.plans_sent.get(key, 1) for name, session in sessions.items()}  # the launch has one
        views_sent = {name: session.views_sent.get(key, (0, 0)) for name, session in sessions.items()}
        observed = ObservedJob(
            job=job,
            run=run,
            nodes=self._all_nodes() if waiting else self._sessions.nodes_named([*nodes, *there]),
            since_s=state.since_s,
            finished_since_s=state.finished_since_s,
            judged_s=state.judged_s,
            plans=ObservedPlans(state.plans, state.placement, state.planned_s, plans_sent, state.refused),
            training=self._training(state),
            devices=ObservedDevices(free=offered, ports=free.ports, unreachable=unreachable if waiting else ""),
            views=ObservedViews(state.views, state.view_since_s, None, state.joining_since_s, views_sent),
            peer_links=self._peer_links,
            data_seed=new_seed() if waiting else "",
        )
        state.broken_since_s = self._broken_since_s(state, observed)
        self._note_moved_state(state, observed)
        since_s, handed_since_s = state.broken_since_s, state.handed_since_s
        return replace(observed, views=replace(observed.views, broken_since_s=since_s, handed_since_s=handed_since_s))

    def _note_moved_state(self, state: JobState, observed: ObservedJob) -> None:
        """Note when state last moved between workers of the run. Only changing members are waited for."""
        if not state.views or state.views[-1].state is ViewState.IN_FORCE:
            return
        handed = {
            rank: one.view_report.handed_bytes for rank, one in observed.workers.items() if one.view_report is not None
        }
        if any(count > state.handed_bytes.get(rank, count) for rank, count in handed.items()):
            state.handed_since_s = self._clock()
        state.handed_bytes = {**state.handed_bytes, **handed}

    def _all_nodes(self) -> Mapping[str, ObservedNode]:
        """Return all nodes, once a pass: a hundred jobs may wait."""
        if self._nodes is None:
            self._nodes = self._sessions.nodes()
        return self._nodes

    def _broken_since_s(self, state: JobState, observed: ObservedJob) -> float | None:
        """Return the time since which a member of the newest view is lost or reports that it is broken."""
        newest = state.views[-1] if state.views else None
        members = members_of(state.run, newest) if state.run is not None and newest is not None else ()
        reports = (worker.view_report for worker in observed.workers.values())
        broken = newest is not None and any(
            one is not None and one.stage is ViewStage.BROKEN and one.view == newest.view for one in reports
        )
        if not broken and all(member.exit is None for member in members):
            return None
        return self._clock() if state.broken_since_s is None else state.broken_since_s

    def _training(self, state: JobState) -> ObservedTraining:
        job, run = state.job, state.run
        memory_step = state.commit.step if state.commit else 0
        if run is None or not job.status.phase.active:
            links = self._links(state) if job.status.phase is JobPhase.QUEUED else {}
            return ObservedTraining(links=links, memory_step=memory_step)
        in_force = (view for view in reversed(state.views) if view.state is ViewState.IN_FORCE)
        view = next(in_force, state.views[0] if state.views else None)
        strategy = strategy_of(job, view)
        progress = self._progress.begin(run, lambda: controller_half(strategy, job.settings_of(strategy)), view=view)
        profile, news = (
            self._profile(state, run, progress) if job.status.phase is not JobPhase.STARTING else (None, False)
        )
        return ObservedTraining(
            profile=profile,
            profile_is_news=news,
            total_batch=progress.total_batch,
            batch_size=progress.batch_size,
            samples=progress.samples,
            optimizer=progress.optimizer,
            batches_per_update=progress.batches_per_update,
            workload_fingerprint=progress.workload_fingerprint,
            state_bytes=progress.state_bytes,
            newest_step=progress.newest_step,
            stepped=progress.stepped,
            resumed=progress.resumed,
            checkpoint_step=progress.checkpoint_step,
            memory_step=memory_step,
            script=progress.script,
        )

    def _may_profile(self, state: JobState) -> bool:
        """Return True if the run's profile is to be made anew in this pass. If ranks are used up, the next pass follows
        at once."""
        progress = self._progress.of(state.job.id, state.job.status.run)
        if progress is None or not progress.profile_is_due(self._clock(), self._profile_every_s):
            return False
        if self._ranks_left <= 0:
            self.nudge()
        return self._ranks_left > 0

    def _profile(self, state: JobState, run: RunRecord, progress: RunProgress) -> tuple[Profile | None, bool]:
        """Return the run's profile, and whether it is new."""
        renew = self._may_profile(state)
        if renew:
            self._ranks_left -= len(run.members)
        return progress.profile(self._clock(), renew=renew)

    def _links(self, state: JobState) -> dict[str, float]:
        """Return the bandwidth of each island's links in the job's last run."""
        progress = self._progress.of(state.job.id, state.job.status.run)
        now_s = self._clock()
        profile = progress.profile(now_s, renew=progress.profile_is_due(now_s))[0] if progress else None
        return {island: link.bandwidth_bps for island, link in profile.links.items()} if profile else {}

    def _may_grow(self, state: JobState) -> bool:
        """Return True if the run may grow: one run at a time, and not while a job that could start waits."""
        if state.run is None or not state.run.members or state.living >= state.job.spec.max_workers:
            return False
        devices = sum(len(s.record.devices) for s in self._sessions.reliable.values())
        for other in self._ledger.jobs.values():
            if other is state:
                continue
            if other.job.status.phase is JobPhase.STOPPING:
                return False
            if other.job.status.phase is JobPhase.QUEUED and other.job.spec.min_workers <= devices:
                return False
        return True

    def _note_finished(self, state: JobState) -> None:
        if state.run and state.finished_since_s is None:
            exits = (m.exit for m in state.run.members)
            if any(exit and exit.kind is WorkerExitKind.FINISHED for exit in exits):
                state.finished_since_s = self._clock()

    def _find_free(self) -> FreeDevices:
        waits = self._unmeasured()
        ready = {name: session for name, session in self._sessions.reliable.items() if name not in waits}
        free = find_free(self._ledger.jobs, ready, self._free_since, self._clock())
        self._free_since = {(d.node, d.index): d.since_s for d in free.devices}
        self.kept_free = free.kept
        return free

    # Nodes

    async def _watch_nodes(self) -> None:
        """Remove lost nodes from etcd, and write the events of nodes that came and went."""
        clock, connected = self._pass_clock(), self._sessions.connected
        for session in connected.values():
            self.note_joined(session.record)
        away = [name for name in self._present if name not in connected]
        lost = [name for name, node in self._sessions.nodes_named(away).items() if is_lost(node, clock)]
        await self._ledger.remove_nodes(lost)
        for name in lost:
            self._present.discard(name)
            self._sessions.remembered.pop(name, None)
            cause = "its agent's stream is gone and its lease ran out"
            self.add_cluster_event(NewEvent(kind=EventKind.NODE_LOST, level=Level.WARNING, node=name, cause=cause))
        while self._cluster_events:
            await self._ledger.cluster_event(self._cluster_events[0])
            del self._cluster_events[0]
        if self._events_dropped:
            cause = "more events of the cluster came at once and are not told one by one"
            count = self._events_dropped
            dropped = NewEvent(kind=EventKind.DROPPED, level=Level.WARNING, count=count, cause=cause)
            await self._ledger.cluster_event(dropped)
            self._events_dropped = 0

    def _stop_orphans(self) -> None:
        jobs = {name: (state.job, state.run) for name, state in self._ledger.jobs.items()}
        seats = seats_by_job(self._ledger.jobs.values())
        busy = [name for name, s in self._sessions.reliable.items() if s.memory_jobs or has_orphans(s, seats)]
        for action in orphan_actions(self._sessions.nodes_named(busy), jobs, self._ledger.unreadable):
            self._outbox.act(None, action, self._clock())


def _joined(node: NodeRecord) -> NewEvent:
    kinds = [d.kind for d in node.devices]
    have = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    kind = EventKind.VOLUNTEER_JOINED if node.volunteer else EventKind.NODE_JOINED
    return NewEvent(kind=kind, node=node.name, cause=f"{have}, island {node.island}, at {node.address}")
