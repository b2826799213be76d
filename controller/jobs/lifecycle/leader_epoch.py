"""A leader epoch: all that exists only while this controller leads."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, Protocol

from atoll.controller.deciding.first import pinned_plan
from atoll.controller.jobs.agents.progress import ProgressBoard
from atoll.controller.jobs.agents.sessions import AgentSession, AgentSessions
from atoll.controller.jobs.agents.strategy_relay import StrategyRelay
from atoll.controller.jobs.lifecycle.reconciler import Reconciler
from atoll.controller.jobs.links.board import LinkBoard
from atoll.controller.jobs.model.connectivity import relay_notice
from atoll.controller.jobs.model.device_memory import overfull
from atoll.controller.jobs.model.members import members_of
from atoll.controller.jobs.model.observed import JobStep
from atoll.controller.jobs.model.policy import pins_of
from atoll.controller.jobs.model.strategy_in_force import why_not_switchable
from atoll.controller.jobs.records.code_bundles import CodeBundles
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.jobs.records.ledger import Ledger
from atoll.controller.state import keys
from atoll.controller.state.codec import encode
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import JobPhase, JobPins, JobRecord, JobStatus, NodeRecord, PlanRecord
from atoll.controller.state.store import Fence, Put, StateStore
from atoll.errors import BadInput, Conflict, ControllerUnreachable, LeadershipLost, StoreUnavailable
from atoll.jobs.job_spec import JobSpec, check_shares, check_total_batch
from atoll.strategies import registry
from atoll.v1 import agents_pb2

logger = logging.getLogger(__name__)


class RelaySource(Protocol):
    def want(self) -> None:
        """Start the relay: a node is behind NAT."""

    def access(self, node: str) -> agents_pb2.ControllerMessage | None:
        """Return the message for this node; None while there is no relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderEpochSettings:
    controller: str
    """This controller's address, as agents reach it."""

    heartbeat_s: float
    node_lease_s: float

    private: bool
    """True if no third party can read messages to agents: only then they carry the secrets of jobs."""

    relay: RelaySource | None = None
    """The relay for nodes behind NAT; None: there is none."""


class LeaderEpoch:
    """Parts of one leader epoch. `over` is set when it ends; nothing may be used after that."""

    def __init__(
        self,
        store: StateStore,
        fence: Fence,
        settings: LeaderEpochSettings,
        removed: Callable[[str], object],
    ) -> None:
        self.settings: Final = settings
        self.over = asyncio.Event()
        self.ledger: Final = Ledger(store, fence, self.nudge)
        self.sessions: Final = AgentSessions(settings.node_lease_s, self.nudge)
        self.progress: Final = ProgressBoard()
        self.relay: Final = StrategyRelay(self.progress.schedulers_notice)
        self.code: Final = CodeBundles(store, fence)
        self.links: Final = LinkBoard(self.sessions, self._write_node, self._tell, self.nudge)
        self.reconciler: Final = Reconciler(
            self.ledger,
            self.sessions,
            self.progress,
            self.links.links,
            unmeasured=self.links.unmeasured,
            node_lease_s=settings.node_lease_s,
            reveal=settings.private,
            removed=self._removed,
        )
        self._told_removed = removed
        self._unused_code = True
        """True if etcd may hold code that no job uses: an earlier leader died, or a Submit failed."""
        self._store = store
        self._fence = fence

    def nudge(self) -> None:
        self.reconciler.nudge()

    def _removed(self, job: str) -> None:
        self.relay.drop(job)
        self._told_removed(job)

    async def load(self) -> None:
        """Mirror etcd. No call may be served before."""
        self.sessions.remember(await self.ledger.load())
        await self._remove_unused_code()
        self.reconciler.remember(self.sessions.remembered)
        for record in self.sessions.remembered.values():
            self.links.remember(record)

    async def run(self) -> None:
        """Reconcile until cancelled. Raises LeadershipLost, after which nothing here may be used."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.reconciler.run(), name="reconciler")
                group.create_task(self.ledger.follow(), name="ledger-watch")
                group.create_task(self.sessions.watch(), name="sessions-watch")
                group.create_task(self.relay.run(self.sessions.send), name="strategy-relay")
                group.create_task(self.links.run(), name="links")
        except* LeadershipLost as lost:
            raise LeadershipLost(str(lost.exceptions[0])) from lost
        finally:
            self.over.set()
            self.sessions.end_all(self._ended())

    @staticmethod
    def _ended() -> ControllerUnreachable:
        return ControllerUnreachable("this controller does not lead any more; connect again")

    async def join(self, session_id: str, node: NodeRecord) -> AgentSession:
        """Admit an agent: its node is in etcd when this returns.

        Raises Conflict, StoreUnavailable, LeadershipLost, and ControllerUnreachable if the epoch ended meanwhile."""
        self.sessions.check(session_id, node)
        node = self.links.place(node)
        await self._write_node(node)
        if self.over.is_set():  # etcd answered late; the sessions of this epoch were ended before
            raise self._ended()
        session = AgentSession(session_id, node, time.monotonic())
        self.sessions.admit(session)
        self.reconciler.note_joined(node)
        return session

    async def _write_node(self, node: NodeRecord) -> None:
        await self._store.commit([Put(keys.node(node.name), encode(node))], (), self._fence)

    def _tell(self, event: NewEvent) -> None:
        self.reconciler.add_cluster_event(event)

    def send_relay_access(self, *sessions: AgentSession) -> None:
        """Send these registered agents, or all, their access to the relay. Start the relay if one of them needs it."""
        relay = self.settings.relay
        for session in sessions or tuple(self.sessions.connected.values()):
            if relay is not None and session.record.behind_nat:
                relay.want()
            if relay is not None and (access := relay.access(session.record.name)) is not None:
                session.send(access)

    async def submit(self, spec: JobSpec, request_id: str, code: bytes, by: str) -> str:
        """Write code and job to etcd. Return the job's id, or that of an earlier Submit with the same request id.

        Raises BadInput for a job with secrets if agents may not receive them."""
        if spec.secrets and not self.settings.private:
            raise BadInput(
                "spec.secrets: this controller serves other machines without TLS, where anyone on the way could read "
                "them. Give it certificates (`atoll certs`), or leave the secrets out"
            )
        low, high = spec.min_workers, spec.max_workers
        cause = f"{spec.script} on {f'{low} to {high}' if low < high else high} worker{'s' * (high > 1)}"
        submitted = NewEvent(kind=EventKind.SUBMITTED, by=by, cause=cause)
        async with self.ledger.writing:  # held over all, so that retention does not remove the code in between
            self.ledger.check_room()
            await self._remove_unused_code()
            self._unused_code = True  # until a job has it
            await self.code.put(spec.code_sha256, code)
            for _ in range(5):  # again where an id is taken
                job = _new_job(spec, request_id, by)
                if known := await self.requested(request_id):
                    return known
                try:
                    await self.ledger.add(job, submitted)
                except Conflict as error:
                    taken = error
                    continue
                self._unused_code = False
                self.nudge()
                return job.id
            raise taken

    async def _remove_unused_code(self) -> None:
        """Remove code that was stored without its job, and code of removed jobs. Call with `writing` held.

        Keep all while a job's record cannot be read, as its code is not known."""
        if self._unused_code and not self.ledger.unreadable:
            await self.code.remove_unused(self.ledger.code_used())
            self._unused_code = False

    async def requested(self, request_id: str) -> str | None:
        """Return the job that a Submit with this request id made."""
        entry = await self._store.read(keys.request(request_id))
        return entry.value.decode() if entry else None

    async def adjust(self, name: str, asked: JobPins, unpin: Collection[str], by: str) -> JobState:
        """Pin a user's values by a plan that is in etcd when this returns, and unpin the values named in `unpin`.

        A repeated call makes no second plan. Raises NotFound, BadInput for values that do not fit the run, and Conflict
        for a job that does not run or has no such value."""
        async with self.ledger.writing:
            state = await self._latest(name)
            current = _adjustable(state, asked)
            job = _pinned(state, asked, unpin, by)
            progress = self.progress.of(job.id, job.status.run)
            step, adapts = progress.next_step if progress else 0, bool(job.spec.adapt.max_batch)
            # The first plan of the view by another strategy has its pins.
            switches = job.wanted_strategy != state.strategy
            pins = pins_of(job, state.strategy)
            plan = None if switches else pinned_plan(current, pins, step, adapts=adapts, by=by)
            events = [NewEvent(kind=EventKind.PLAN_ISSUED, plan=plan.id, cause=plan.reason)] if plan else []
            if plan is not None and state.run is not None:
                members = members_of(state.run, state.views[-1] if state.views else None)
                events += overfull(job.learned, members, plan)
            if asked.strategy and switches:
                events.append(NewEvent(kind=EventKind.STRATEGY_ASKED, by=by, cause=asked.strategy))
            if unpin:
                events.append(NewEvent(kind=EventKind.UNPINNED, by=by, cause=", ".join(sorted(unpin))))
            if plan or job != state.job:
                await self._write(state, JobStep(job, state.run, plan, tuple(events)))
        self.nudge()
        return state

    async def cancel(self, name: str, by: str) -> JobState:
        """Write the wish to cancel. Raises NotFound, and Conflict for a job that ended otherwise."""
        async with self.ledger.writing:
            state = await self._latest(name)
            job = state.job
            if job.status.phase.ended and not job.cancel:
                raise Conflict(f"job {job.id} is {job.status.phase.lower()} already: {job.status.reason}")
            if not job.cancel:
                event = NewEvent(kind=EventKind.CANCEL_REQUESTED, by=by)
                await self._write(
                    state, JobStep(replace(job, cancel=True, cancelled_by=by), state.run, events=(event,))
                )
        self.nudge()
        return state

    def removable(self, name: str) -> JobState:
        """Return a job that may be removed. Raises NotFound, and Conflict for a job that lives, or whose checkpoints
        another job may resume from."""
        found = self.ledger.find(name)
        job = found.job
        if not job.status.phase.ended:
            state = f"job {job.id} is {job.status.phase.lower()}"
            raise Conflict(f"{state}; only ended jobs can be removed. `atoll cancel {job.id}` ends it")
        for other in self.ledger.jobs.values():
            start = other.job.spec.checkpoint.start_from
            if start is not None and start.job == job.id and not other.job.status.phase.ended:
                why = f"job {other.job.id} began with its checkpoints and may go back to them"
                raise Conflict(f"job {job.id} cannot be removed yet: {why}. Repeat it when that one is over")
        return found

    async def remove(self, name: str, text: str) -> None:
        """Remove a job with its logs and all its records. text: of the cluster's event. Raises as `removable`."""
        async with self.ledger.writing:
            await self._latest(name)
            job = self.removable(name).job
            await self.ledger.remove(self.ledger.jobs[job.id], NewEvent(kind=EventKind.NOTICE, cause=text))
        self.reconciler.forget(job.id)
        self.nudge()

    async def _latest(self, name: str) -> JobState:
        """Return the job as it is in etcd. Call with `writing` held."""
        state = self.ledger.find(name)
        if state.stale:
            await self.ledger.reread(state.job.id)
            state = self.ledger.find(state.job.id)
        return state

    async def _write(self, state: JobState, step: JobStep) -> None:
        try:
            await self.ledger.write(state, step)
        except StoreUnavailable:
            self.nudge()
            raise


def _new_job(spec: JobSpec, request_id: str, by: str) -> JobRecord:
    return JobRecord(
        id=f"{spec.name}-{secrets.token_hex(2)}",
        spec=spec,
        request_id=request_id,
        submitted_unix_s=time.time(),
        submitted_by=by,
        status=JobStatus(reason="submitted"),
    )


def _adjustable(state: JobState, asked: JobPins) -> PlanRecord:
    """Return the newest plan of a run that can take these values now. Raises BadInput, Conflict."""
    job = state.job
    if job.status.phase not in (JobPhase.STARTING, JobPhase.RUNNING) or not state.plans:
        again = "Submit it again with these settings" if job.status.phase.ended else "Try again when it runs"
        phase = job.status.phase.lower()
        raise Conflict(f"job {job.id} is {phase}, and only a running job can be adjusted. {again}")
    current = state.plans[-1]
    if asked.total_batch:
        check_total_batch(asked.total_batch, len(current.shares))
    if asked.shares:
        check_shares(asked.shares, len(current.shares))
    if asked.strategy:
        _check_switch(state, asked)
    return current


def _check_switch(state: JobState, asked: JobPins) -> None:
    """Raise BadInput or Conflict if the run cannot change to the strategy that is asked for."""
    job, before, after = state.job, state.strategy, registry.find(asked.strategy)
    if before == after.name:
        return
    if asked.shares:
        raise BadInput("shares are of the view before the switch. Give them once the job trains by its new strategy")
    if why := why_not_switchable(job, before, after.name):
        raise BadInput(f"job {job.id}: {why}")
    members = members_of(state.run, state.views[-1]) if state.run is not None and state.views else ()
    if not after.relayed and relay_notice(members):
        raise BadInput(
            f"job {job.id} has workers behind NAT, and strategy {after.name} goes through no relay. Use another, or "
            "make the nodes reachable"
        )


def _pinned(state: JobState, asked: JobPins, unpin: Collection[str], by: str) -> JobRecord:
    job = state.job
    kept = pins_of(job, state.strategy)
    if asked.strategy and asked.strategy != state.strategy:
        kept = replace(kept, strategy_params={})  # they are of the strategy that is left
    strategy = asked.strategy or ("" if "strategy" in unpin else kept.strategy)
    shares = asked.shares or (() if "shares" in unpin else kept.shares)
    pinned = JobPins(
        strategy_params={n: v for n, v in kept.strategy_params.items() if n not in unpin} | dict(asked.strategy_params),
        total_batch=asked.total_batch or (0 if "total-batch" in unpin else kept.total_batch),
        shares=shares,
        run=job.status.run if shares else 0,
        view=job.status.view if shares else 0,
        strategy=strategy,
        strategy_by=by if asked.strategy else kept.strategy_by if strategy else "",
    )
    return replace(job, pinned=pinned)
