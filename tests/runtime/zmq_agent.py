"""An agent's side of worker.proto, and workers started as an agent starts them. Real sockets, real processes."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import zmq
from held_ports import free_port
from zmq.utils.monitor import parse_monitor_message

from atoll.agent.runtime.transport.keys import generate
from atoll.security.volunteer_ticket import ticket
from atoll.strategies.declaration import as_json
from atoll.v1.agents_pb2 import DataKeys, Helping, Launch, Member, Notice, Prepared, View, ViewMember
from atoll.v1.common_pb2 import (
    LEVEL_WARNING,
    VIEW_STAGE_TRAINING,
    VIEW_STAGE_UNSPECIFIED,
    CheckpointPolicy,
    JobSpec,
    LinkSample,
    Metrics,
    Plan,
    StepSample,
    StrategyMessage,
    ViewReport,
    ViewStage,
    WorkerId,
)
from atoll.v1.worker_pb2 import Stop, SupervisorMessage, Welcome, WorkerMessage

SCRIPTS = Path(__file__).parent / "scripts"
STACKS_S = 5.0
"""The longest wait for the stacks of workers that hang."""


class Worker(Protocol):
    """What is asked of a worker's process."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


class Start(Protocol):
    """How workers are started; output goes to `log`, where it is None to the test's own."""

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None, /) -> Worker: ...


def start_process(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None) -> Worker:
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT if log else None)


def torchrun_like(
    script: str,
    *args: str,
    world_size: int = 2,
    deadline_s: float = 120.0,
    islands: Sequence[str] = (),
    start: Start = start_process,
    log: IO[bytes] | None = None,
) -> list[int]:
    """Run a script with the variables that torchrun sets, no agent; its exit codes by rank. islands: name of each
    rank's."""
    port = free_port()
    workers: list[Worker] = []
    for rank in range(world_size):
        environment = os.environ | torchrun_environment(rank, world_size, port)
        if islands:
            environment["ATOLL_ISLAND"] = islands[rank]
        workers.append(start([sys.executable, str(SCRIPTS / script), *args], environment, log))
    ends_s = time.monotonic() + deadline_s
    try:
        return [worker.wait(timeout=max(ends_s - time.monotonic(), 0.1)) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(timeout=30)


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@dataclass
class Volunteers:
    """Who may help a run's ranks."""

    secret: bytes = b""
    """With which tickets are made; empty where nobody may."""
    ports: dict[int, int] = field(default_factory=dict)
    """By rank, where it takes help."""
    helping: dict[int, Helping] = field(default_factory=dict)
    """By a volunteer's number, whom it helps."""


class FakeAgent:
    """Answers Hello, records everything, and sends what a test asks for. Owns its thread and the workers it starts."""

    strategy_is_automatic = False
    passes = 1  # of the plans that this agent makes

    def __init__(
        self,
        directory: Path,
        *,
        run: int = 1,
        world_size: int = 1,
        job: str = "tiny-test",
        start: Start = start_process,
    ) -> None:
        """directory: for its socket, the workers' output and the job's checkpoints; the same for all runs of a job."""
        self.job, self.run, self.world_size = job, run, world_size
        self.endpoint = f"ipc://{directory}/agent-{run}.sock"
        self.secret = secrets.token_hex(8)
        self.job_directory = directory / "job"
        self.job_directory.mkdir(exist_ok=True)
        self.spec = JobSpec(name="tiny", seed=7, checkpoint=CheckpointPolicy(every_steps=0, keep=3))
        self.shares: Sequence[float] = (1.0,) * world_size
        self.params: Mapping[str, Any] = {}  # of the first plan, for its strategy
        self.asked: list[tuple[int, str]] = []  # by rank, messages of its strategy
        self.answers: Callable[[int, str], Sequence[tuple[int, str]]] = lambda rank, body: ()
        self.total_batch = 0  # likewise
        self.learning_rate_factor = 0.0
        self.later_plans: list[Plan] = []  # told in Welcome
        self.members: Sequence[Member] = ()
        self.keys: Sequence[DataKeys] = ()  # by rank
        self.volunteers = Volunteers()
        self.speed = 1.0
        self.speeds: dict[int, float] = {}  # of ranks that have another
        self.saves = True  # checkpoints, to disk
        self.own_directories = False  # as if each rank were alone on a machine
        self.memory: Path | None = None  # where checkpoints stay in memory; of each rank its own with own_directories
        self.memory_bytes = 1 << 30
        self.rooms: dict[int, int] = {}  # by rank, where it is another
        self.spill: Path | None = None  # where those lie that do not fit in memory; of each rank its own
        self.without_memory: Collection[int] = ()  # ranks whose agent has no folder for them
        self.memory_steps: dict[int, int] = {}  # by rank
        self.answer_hello = True
        self.makes_views = False  # workers that lose a peer wait for a view
        self._view = View()
        self._view_to: Sequence[int] = ()
        self.joining: dict[int, View] = {}  # by rank, beside which view it was launched
        self.stands: dict[int, list[ViewReport]] = defaultdict(list)  # by rank, what each said, in order
        self.said_at_s: dict[int, list[float]] = defaultdict(list)  # monotonic, when
        self.steps: dict[int, list[StepSample]] = defaultdict(list)
        self.metrics: dict[int, list[Metrics]] = defaultdict(list)
        self.links: dict[int, dict[int, LinkSample]] = defaultdict(dict)  # the newest, by peer
        self.notices: list[Notice] = []
        self.hellos: list[WorkerMessage] = []
        self.alive: dict[int, tuple[int, int]] = {}  # by rank: step, plan
        self.alive_count = self.checkpoint_step = 0
        self.entries: dict[int, int] = {}  # of parameters, by rank
        self.prepared = Prepared()  # as rank 0 told last
        self.workers: list[Worker] = []
        self._start = start
        self._outgoing: list[tuple[int, SupervisorMessage]] = []
        self._connections: set[int] = set()  # by descriptor, those of which not everything was taken
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-agent")

    def __enter__(self) -> FakeAgent:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.kill()
            worker.wait(timeout=30)
        self._closing.set()
        self._thread.join(timeout=30)

    def id_of(self, rank: int) -> WorkerId:
        return WorkerId(job=self.job, run=self.run, rank=rank)

    def send(self, rank: int, message: SupervisorMessage) -> None:
        with self._changed:
            self._outgoing.append((rank, message))

    def plan(
        self,
        plan_id: int,
        from_step: int,
        shares: Sequence[float],
        params: Mapping[str, Any] | None = None,
        *,
        total_batch: int = 0,
        learning_rate_factor: float = 0.0,
        view: int = 0,
    ) -> Plan:
        return Plan(
            id=plan_id,
            run=self.run,
            from_step=from_step,
            shares=shares,
            planner="test",
            strategy_params=as_json(params or {}),
            total_batch=total_batch,
            learning_rate_factor=learning_rate_factor,
            view=view,
            passes=self.passes,
        )

    def send_view(
        self,
        number: int,
        ranks: Sequence[int],
        shares: Sequence[float],
        *,
        plan_id: int,
        in_force: int = 1,
        total_batch: int = 0,
        meet_s: float = 15.0,
        to: Sequence[int] = (),
        without_state: Collection[int] = (),
        at_boundary: bool = False,
        keeps_unsent: bool = False,
        strategy: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell these workers of a view of `ranks`, at once; its members where nobody else is named."""
        view = self._view_of(
            number, ranks, without_state, self.plan(plan_id, 0, shares, total_batch=total_batch, view=number)
        )
        view.at_boundary, view.meet_s, view.in_force = at_boundary, meet_s, in_force
        view.keeps_unsent = keeps_unsent
        view.strategy, view.strategy_settings = strategy, as_json(settings or {})
        self._view, self._view_to = view, tuple(to or ranks)
        for rank in self._view_to:
            self.send(rank, SupervisorMessage(view=view))

    def _view_of(self, number: int, ranks: Sequence[int], without_state: Collection[int], plan: Plan) -> View:
        places = {member.rank: member for member in self._placed(ranks)}
        members = [
            ViewMember(member=places.get(rank, Member(rank=rank)), has_state=rank not in without_state)
            for rank in ranks
        ]
        if self.keys:
            for member, rank in zip(members, ranks, strict=True):
                member.public_key = self.keys[0].public[rank]
        return View(
            job=self.job,
            run=self.run,
            view=number,
            members=members,
            master_address="127.0.0.1",
            master_port=free_port(),
            plan=plan,
            reason="the test changed the members",
        )

    def put_in_force(self) -> None:
        """The view that was sent last, once all its members train in it."""
        self.wait_for_stage(self._view.view, VIEW_STAGE_TRAINING, *(one.member.rank for one in self._view.members))
        self._view.in_force = self._view.view
        for rank in self._view_to:
            self.send(rank, SupervisorMessage(view=self._view))

    def stands_at(self, rank: int) -> tuple[int, ViewStage.ValueType]:
        """The view and the stage that this worker said last."""
        said = self.stands[rank][-1:]
        return (said[0].view, said[0].stage) if said else (0, VIEW_STAGE_UNSPECIFIED)

    def wait_for_stage(self, view: int, stage: ViewStage.ValueType, *ranks: int) -> None:
        self.wait_until(lambda: all(self.stands_at(rank) == (view, stage) for rank in ranks))

    def send_plan(self, plan_id: int, from_step: int, shares: Sequence[float], *ranks: int, **params: float) -> None:
        """To these ranks; to all where none is named."""
        for rank in ranks or range(self.world_size):
            self.send(rank, SupervisorMessage(plan=self.plan(plan_id, from_step, shares, params)))

    def place(self, nodes: Sequence[str], islands: Sequence[str]) -> None:
        """Let launches say where each rank is, those who join too, and hand out the run's data keys."""
        self.members = [
            Member(rank=rank, node=node, island=island)
            for rank, (node, island) in enumerate(zip(nodes, islands, strict=True))
        ]
        pairs = [generate() for _ in nodes]
        public = [own for _, own in pairs]
        self.keys = [DataKeys(secret=secret, public=public) for secret, _ in pairs]

    def send_stop(self, rank: int, grace_s: float = 20.0) -> None:
        self.send(rank, SupervisorMessage(stop=Stop(grace_s=grace_s, reason="the test asked")))

    def send_stop_in(self, step: int, rank: int) -> None:
        """As soon as this rank said that it is in the step."""
        self.wait_until(lambda: self.alive.get(rank, (0, 0))[0] >= step)
        self.send_stop(rank)

    def wait_until(self, what: Callable[[], bool], deadline_s: float = 120.0) -> None:
        with self._changed:
            assert self._changed.wait_for(what, timeout=deadline_s), self._stuck()

    def lose_power(self, at_step: int) -> None:
        """All machines at once, after this step is in memory everywhere."""
        self.wait_until(lambda: len(self.memory_steps) == self.world_size)
        self.wait_until(lambda: min(self.memory_steps.values()) >= at_step)
        for worker in self.workers:
            worker.send_signal(signal.SIGKILL)
        assert self.exit_codes() == [-signal.SIGKILL] * self.world_size, self.said()

    def directory_of(self, rank: int) -> Path:
        return self.job_directory / f"node-{rank}" if self.own_directories else self.job_directory

    def memory_of(self, rank: int) -> Path | None:
        if self.memory is None or rank in self.without_memory:
            return None
        folder = self.memory / f"node-{rank}" if self.own_directories else self.memory
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def wait_for_step(self, step: int, deadline_s: float = 120.0) -> None:
        """Until every rank said that it has come so far."""
        ranks = range(self.world_size)
        self.wait_until(lambda: all(self.alive.get(rank, (0, 0))[0] >= step for rank in ranks), deadline_s)

    def environment(self, rank: int, port: int) -> dict[str, str]:
        return {
            **os.environ,
            **torchrun_environment(rank, self.world_size, port),
            "LOCAL_RANK": "0" if self.own_directories else str(rank),
            "LOCAL_WORLD_SIZE": "1" if self.own_directories else str(self.world_size),
            "ATOLL_AGENT_SOCKET": self.endpoint,
            "ATOLL_JOB": self.job,
            "ATOLL_RUN": str(self.run),
            "ATOLL_WORKER_SECRET": self.secret,
        }

    def start_workers(self, script: str, *args: str) -> None:
        port = free_port()
        for rank in range(self.world_size):
            log = (self.job_directory / f"run-{self.run}-rank-{rank}.log").open("wb")
            with log:
                command = [sys.executable, str(SCRIPTS / script), *args]
                environment = self.environment(rank, port)
                self.workers.append(self._start(command, environment, log))

    def joiner_environment(self, rank: int) -> dict[str, str]:
        """Return the environment of one more worker, launched beside the newest view."""
        ranks = range(self.world_size)
        view = self._view if self._view.view else self._view_of(1, ranks, (), self.plan(1, 0, self.shares, view=1))
        self.joining[rank] = view
        return {
            **self.environment(rank, free_port()),
            "ATOLL_RANK": str(rank),
            "RANK": str(len(view.members)),
            "WORLD_SIZE": str(len(view.members) + 1),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }

    def volunteer_environment(self, number: int, rank: int) -> dict[str, str]:
        """Return the environment of a volunteer that helps this rank, which has said where."""
        name = f"friend-{number}/0"
        self.volunteers.helping[number] = Helping(
            name=name,
            ticket=ticket(self.volunteers.secret, name),
            address="127.0.0.1",
            port=self.volunteers.ports[rank],
            public_key=self.keys[0].public[rank],
        )
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return {**self.environment(number, free_port()), **alone, "ATOLL_RANK": str(number)}

    def start_joiner(self, script: str, *args: str) -> int:
        """Start one more worker beside the newest view. Returns its rank."""
        rank = len(self.workers)
        environment = self.joiner_environment(rank)
        with (self.job_directory / f"run-{self.run}-rank-{rank}.log").open("wb") as log:
            self.workers.append(self._start([sys.executable, str(SCRIPTS / script), *args], environment, log))
        return rank

    def exit_codes(self, deadline_s: float = 120.0) -> list[int]:
        """Of all workers, whose last words have come here then."""
        ends_s = time.monotonic() + deadline_s
        try:
            codes = [worker.wait(timeout=max(ends_s - time.monotonic(), 0.1)) for worker in self.workers]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self._stuck()}") from None
        self.wait_until(lambda: not self._connections)  # of a process that has ended some may still be on its way
        return codes

    def _stuck(self) -> str:
        """Return what the workers printed, with the stacks of those that run (tests/runtime/warm.py prints them)."""
        running = [worker for worker in self.workers if worker.poll() is None]
        for worker in running:
            worker.send_signal(signal.SIGUSR2)
        ends_s = time.monotonic() + STACKS_S
        while self.said().count("(most recent call first)") < len(running) and time.monotonic() < ends_s:
            time.sleep(0.05)
        return self.said()

    def said(self) -> str:
        """What the workers printed, for assertions that fail."""
        logs = sorted(self.job_directory.glob("run-*-rank-*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)

    @property
    def warnings(self) -> list[str]:
        """Notices that tell of something wrong; a slow disk brings others."""
        return [notice.text for notice in self.notices if notice.level >= LEVEL_WARNING]

    def _serve(self) -> None:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        router.bind(self.endpoint)
        try:
            while not self._closing.is_set():
                router.poll(20)
                events = []
                while monitor.poll(0):
                    events.append(parse_monitor_message(monitor.recv_multipart()))
                while router.poll(0):  # after the events: what came over a connection lies here before it ends
                    identity, payload = router.recv_multipart()
                    self._take(router, identity, WorkerMessage.FromString(payload))
                with self._changed:
                    for event in events:
                        if event["event"] == zmq.EVENT_ACCEPTED:
                            self._connections.add(event["value"])
                        else:
                            self._connections.discard(event["value"])
                            self._changed.notify_all()
                    outgoing, self._outgoing = self._outgoing, []
                for rank, message in outgoing:
                    router.send_multipart([self._identity(rank), message.SerializeToString()])
        finally:
            context.destroy(linger=200)

    def _take(self, router: zmq.Socket[bytes], identity: bytes, message: WorkerMessage) -> None:
        rank = message.id.rank
        assert identity == self._identity(rank)
        with self._changed:
            match message.WhichOneof("body"):
                case "hello":
                    self.hellos.append(message)
                    if self.answer_hello and message.hello.secret == self.secret:
                        router.send_multipart([identity, self._welcome(rank).SerializeToString()])
                case "alive":
                    self.alive[rank] = (message.alive.step, message.alive.plan)
                    if message.alive.volunteer_port:
                        self.volunteers.ports[rank] = message.alive.volunteer_port
                    if message.alive.HasField("view") and self.stands[rank][-1:] != [message.alive.view]:
                        self.stands[rank].append(message.alive.view)
                        self.said_at_s[rank].append(time.monotonic())
                    self.alive_count += 1
                case "strategy":
                    self.asked.append((rank, message.strategy.body))
                    for to, body in self.answers(rank, message.strategy.body):
                        answer = SupervisorMessage(strategy=StrategyMessage(id=self.id_of(to), body=body))
                        router.send_multipart([self._identity(to), answer.SerializeToString()])
                case "telemetry":
                    self.steps[rank].extend(message.telemetry.steps)
                    self.metrics[rank].extend(message.telemetry.metrics)
                    self.links[rank].update({link.peer: link for link in message.telemetry.links})
                    self.notices.extend(message.telemetry.notices)
                    self.checkpoint_step = max(self.checkpoint_step, message.telemetry.checkpoint_step)
                    self.memory_steps[rank] = message.telemetry.memory_step
                    self.entries[rank] = message.telemetry.prepared.entries
                    if rank == 0:
                        self.prepared.CopyFrom(message.telemetry.prepared)
            self._changed.notify_all()

    def _identity(self, rank: int) -> bytes:
        return f"{self.job}/{self.run}/{rank}".encode()

    def _placed(self, ranks: Sequence[int] | None = None) -> list[Member]:
        """The members, those of a view where its ranks are given, each node's state kept by the next ones."""
        there = [self.members[rank] for rank in ranks or range(self.world_size) if rank < len(self.members)]
        nodes = list(dict.fromkeys(member.node for member in there))
        copies = min(self.spec.checkpoint.memory_replicas, len(nodes)) - 1
        return [
            Member(
                rank=member.rank,
                node=member.node,
                island=member.island,
                holders=[(nodes.index(member.node) + ahead) % len(nodes) for ahead in range(1, copies + 1)],
            )
            for member in there
        ]

    def _welcome(self, rank: int) -> SupervisorMessage:
        beside, helping = self.joining.get(rank), self.volunteers.helping.get(rank)
        first = self.plan(
            1,
            0,
            self.shares,
            self.params,
            total_batch=self.total_batch,
            learning_rate_factor=self.learning_rate_factor,
            view=int(self.makes_views),
        )
        if helping is not None:
            first = self.plan(1, 0, (1.0,))
        world_size = 1 if helping is not None else self.world_size if beside is None else len(beside.members) + 1
        keys = self.keys[rank] if self.keys and helping is None else None
        alone = beside is not None or helping is not None
        launch = Launch(
            id=self.id_of(rank),
            world_size=world_size,
            local_rank=0 if alone else rank,
            local_world_size=1 if alone else self.world_size,
            spec=self.spec,
            plan=first if beside is None else beside.plan,
            members=self._placed(range(world_size)) if helping is None else (),
            keys=DataKeys(secret=keys.secret, public=keys.public[:world_size], volunteers=self.volunteers.secret)
            if keys is not None
            else None,
            joins=beside,
            helping=helping,
            strategy_is_automatic=self.strategy_is_automatic,
        )
        return SupervisorMessage(
            welcome=Welcome(
                launch=launch,
                job_directory=str(self.directory_of(rank)) if self.saves else "",
                speed=self.speeds.get(rank, self.speed),
                plans=self.later_plans,
                memory_directory=str(self.memory_of(rank) or ""),
                memory_bytes=self.rooms.get(rank, self.memory_bytes),
                spill_directory=str(self.spill / f"node-{rank}") if self.spill else "",
                spill_bytes=1 << 30 if self.spill else 0,
            )
        )
