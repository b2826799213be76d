"""A cluster without sockets on a clock of its own: the real ledger, sessions and reconciler over a real etcd, and
agents that obey. Controllers may be killed between any two writes; agents and their workers live on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from made import spec

from atoll.agent.incoming import each_worker
from atoll.controller.jobs.agents.progress import ProgressBoard
from atoll.controller.jobs.agents.sessions import AgentSession, AgentSessions, Outgoing
from atoll.controller.jobs.lifecycle.reconciler import Reconciler
from atoll.controller.jobs.model.peer_links import PeerLinks
from atoll.controller.jobs.records.ledger import Ledger
from atoll.controller.state import keys
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import DeviceRecord, JobRecord, NodeRecord
from atoll.controller.state.store import (
    Change,
    DeletePrefix,
    Entry,
    Fence,
    Put,
    StateStore,
    StoreSnapshot,
    Unchanged,
    WatchBatch,
)
from atoll.errors import StoreUnavailable
from atoll.v1 import agents_pb2, common_pb2

Key = tuple[str, int, int]
TICK_S = 0.25


class Killed(BaseException):
    """The controller process is gone at this line."""


class Breaking:
    """A store that fails at its `at`-th commit: before it, after it, or by killing its user after it."""

    def __init__(self, inner: StateStore, how: str) -> None:
        self._inner = inner
        self._at = 0
        self._how = how
        self.commits = 0
        self.broke = False

    def arm(self, at: int) -> None:
        """Count from here; 0 fails never."""
        self._at, self.commits = at, 0

    async def commit(
        self, changes: Sequence[Change], conditions: Sequence[Unchanged] = (), fence: Fence | None = None
    ) -> int:
        self.commits += 1
        failing = 0 < self._at == self.commits
        self.broke = self.broke or failing
        if failing and self._how == "before":
            raise StoreUnavailable("etcd is away")
        revision = await self._inner.commit(changes, conditions, fence)
        if failing:
            if self._how == "killed":
                raise Killed
            raise StoreUnavailable("the answer was lost; it may have been written")
        return revision

    async def read(self, key: str) -> Entry | None:
        return await self._inner.read(key)

    async def read_prefix(self, prefix: str, *, keys_only: bool = False) -> StoreSnapshot:
        return await self._inner.read_prefix(prefix, keys_only=keys_only)

    async def grant_lease(self, ttl_s: int) -> int:
        return await self._inner.grant_lease(ttl_s)

    def refresh_lease(self, lease: int, timeout_s: float) -> float:
        return self._inner.refresh_lease(lease, timeout_s)

    async def revoke_lease(self, lease: int) -> None:
        await self._inner.revoke_lease(lease)

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchBatch]:
        return self._inner.watch(prefix, from_revision)

    async def close(self) -> None:
        await self._inner.close()


@dataclass
class Agent:
    """Starts what it is told to, at most one worker on each device, and remembers all it ever started. `earlier`: it
    starts only the first worker of a launch, as agents of before did."""

    name: str
    workers: dict[Key, common_pb2.WorkerStatus] = field(default_factory=dict)
    started: list[Key] = field(default_factory=list)
    doubles: list[str] = field(default_factory=list)
    up: bool = True
    tells: bool = False  # of its workers' steps, and of what is complete in memory
    work_per_s: float = 0.0
    devices: int = 1
    earlier: bool = False
    launches: int = 0

    @property
    def record(self) -> NodeRecord:
        devices = tuple(
            DeviceRecord(index=i, kind="cpu", model="fake", memory_bytes=1, speed=1.0, work_per_s=self.work_per_s)
            for i in range(self.devices)
        )
        return NodeRecord(name=self.name, island="x", address="127.0.0.1", memory_bytes=1, devices=devices, version="0")

    def alive(self) -> list[Key]:
        return [key for key, status in self.workers.items() if status.state != common_pb2.WORKER_STATE_EXITED]

    def end(self, key: Key, kind: int, code: int = 0, reason: str = "") -> None:
        status = self.workers[key]
        status.state = common_pb2.WORKER_STATE_EXITED
        status.exit_kind, status.exit_code, status.reason = kind, code, reason  # type: ignore[assignment]

    def obey(self, told: Outgoing) -> None:
        message = agents_pb2.ControllerMessage.FromString(told) if isinstance(told, bytes) else told
        match message.WhichOneof("body"):
            case "launch":
                self.launches += 1
                for launch in each_worker(message.launch)[: 1 if self.earlier else None]:
                    self._launch(launch)
            case "stop":
                for key in self.alive():
                    if key[0] == message.stop.job and key[1] <= message.stop.run:
                        self.end(key, common_pb2.EXIT_KIND_DRAINED, 85)
            case "forget":
                self.workers.pop(_key(message.forget.id), None)

    def _launch(self, launch: agents_pb2.Launch) -> None:
        key = _key(launch.id)
        if key in self.workers:
            return
        if len(self.alive()) >= self.devices or key in self.started:
            self.doubles.append(f"{key} beside {self.alive()}, after {self.started}")
        self.started.append(key)
        self.workers[key] = common_pb2.WorkerStatus(
            id=launch.id, state=common_pb2.WORKER_STATE_RUNNING, uses_atoll=True, step=len(self.started)
        )

    def telemetry(self) -> list[agents_pb2.WorkerTelemetry]:
        """Run n resumes from step 10 n, out of memory, and tells of two steps and the first of them in memory."""
        told = []
        for job, run, rank in self.alive() if self.tells else ():
            first = 10 * run if run > 1 else 0
            step = common_pb2.StepSample(step=first + 1, total_batch=2, local_batch=1, step_s=0.1, plan=1)
            told.append(
                agents_pb2.WorkerTelemetry(
                    id=common_pb2.WorkerId(job=job, run=run, rank=rank),
                    steps=[step],
                    resumed=agents_pb2.Resumed(tier="memory" if run > 1 else "start", step=first),
                    memory_step=first + 1,
                )
            )
        return told


class Cluster:
    """Agents and a clock that outlive controllers."""

    def __init__(self, store: StateStore, *names: str) -> None:
        self.store = store
        self.now_s = 1000.0
        self.agents = {name: Agent(name) for name in names}
        self.life: Life | None = None

    async def elect(self, store: StateStore | None = None) -> None:
        """A new controller leads; the fence of the one before does not hold any more."""
        await self.store.commit([DeletePrefix(keys.LEADER)])
        revision = await self.store.commit([Put(keys.LEADER, b"me")])
        self.life = Life(self, store or self.store, Fence(keys.LEADER, revision))
        await self.life.begin()

    async def tick(self) -> None:
        """A quarter of a second: agents report, the controller looks, agents obey."""
        assert self.life is not None
        self.now_s += TICK_S
        await self.life.tick()

    async def ticks(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            await self.tick()


class Life:
    """One controller process."""

    def __init__(self, cluster: Cluster, store: StateStore, fence: Fence) -> None:
        def clock() -> float:
            return cluster.now_s

        self._cluster = cluster
        self.ledger = Ledger(store, fence, lambda: None, clock)
        self.sessions = AgentSessions(3.0, lambda: None, clock)
        self.progress = ProgressBoard(clock)
        self.reconciler = Reconciler(
            self.ledger, self.sessions, self.progress, PeerLinks(), node_lease_s=3.0, reveal=True, clock=clock
        )

    async def begin(self) -> None:
        self.sessions.remember(await self.ledger.load())
        self.reconciler.remember(self.sessions.remembered)

    async def submit(self, id: str = "tiny-0001", workers: tuple[int, int] = (1, 2), **fields: object) -> None:
        made = spec(min_workers=workers[0], max_workers=workers[1], **fields)
        async with self.ledger.writing:
            await self.ledger.add(JobRecord(id=id, spec=made, request_id=id), NewEvent(kind=EventKind.SUBMITTED))

    async def tick(self) -> None:
        self.report()
        try:
            await self.reconciler.once()
        except StoreUnavailable:
            return  # looked at again with the next tick
        await self.obey()

    def report(self) -> None:
        """All agents beat, and tell what they have to."""
        for agent in self._cluster.agents.values():
            self._report(agent)

    async def obey(self) -> None:
        """All agents do what they were told."""
        for agent in self._cluster.agents.values():
            session = self.sessions.connected.get(agent.name)
            while session and session.waiting:
                message = await session.next_message()
                assert message is not None
                agent.obey(message)

    def _report(self, agent: Agent) -> None:
        session = self.sessions.connected.get(agent.name)
        if not agent.up:
            if session:
                self.sessions.leave(session)
            return
        if session is None:
            session = AgentSession(agent.name, agent.record, self._cluster.now_s)
            self.sessions.admit(session)
        session.last_message_s = self._cluster.now_s
        session.report([_copy(status) for status in agent.workers.values()], [29500])
        for telemetry in agent.telemetry():
            self.progress.observe(telemetry)


def _copy(status: common_pb2.WorkerStatus) -> common_pb2.WorkerStatus:
    copied = common_pb2.WorkerStatus()
    copied.CopyFrom(status)
    return copied


def _key(worker: common_pb2.WorkerId) -> Key:
    return worker.job, worker.run, worker.rank
