"""A controller that does what a test tells it, on a real gRPC server, and an agent that serves it; one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
import psutil
from held_ports import free_port

from atoll.agent.daemon import serve
from atoll.agent.supervisor.settings import AgentSettings
from atoll.network.rpc import LEADER_METADATA, SERVER_OPTIONS
from atoll.v1 import agents_pb2, agents_pb2_grpc, common_pb2
from atoll.v1.agents_pb2 import ControllerMessage, Launch

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

STARTED_BEFORE: Final = frozenset(psutil.Process().children(recursive=True))
"""Where `scripts/test` runs pytest, what it forks workers from."""


def children() -> set[psutil.Process]:
    """Return the processes that tests have started, and those that they did."""
    return set(psutil.Process().children(recursive=True)) - STARTED_BEFORE


async def until(what: str, condition: Callable[[], T], deadline_s: float = 30.0) -> T:
    """Wait until the condition is truthy. The failure says what was waited for."""
    ends_s = asyncio.get_running_loop().time() + deadline_s
    while not (value := condition()):
        assert asyncio.get_running_loop().time() < ends_s, f"not within {deadline_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return value


def bundle_of(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


class ScriptedController(agents_pb2_grpc.AgentServiceServicer):
    """Records what agents say, sends what the test asks for, acknowledges and keeps output."""

    def __init__(self) -> None:
        self.registers: list[agents_pb2.Register] = []
        self.statuses: dict[tuple[str, int, int], common_pb2.WorkerStatus] = {}
        self.heartbeats = 0
        self.ports: tuple[int, ...] = ()
        self.telemetry: list[agents_pb2.WorkerTelemetry] = []
        self.samples: list[common_pb2.DeviceSample] = []
        self.output: dict[tuple[str, int, int], bytes] = {}
        self.acks = True
        self.pulse_s = 0.0
        self.bundles: dict[str, bytes] = {}
        self.fetches = 0
        self.token = ""
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.leader: str | None = None
        self.connected = False
        self._outgoing: asyncio.Queue[ControllerMessage] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.port = free_port()  # also while it is away: nobody else takes it

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        agents_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None
            self.connected = False

    def send(self, **body: Any) -> None:
        self._outgoing.put_nowait(ControllerMessage(**body))

    def add_code(self, files: Mapping[str, str]) -> str:
        bundle = bundle_of(files)
        sha256 = hashlib.sha256(bundle).hexdigest()
        self.bundles[sha256] = bundle
        return sha256

    def launch(self, script: str, *, job: str = "job-1", run: int = 1, rank: int = 0, **changes: Any) -> Launch:
        """Send (and return) a Launch of a worker with this script."""
        sha256 = self.add_code({"train.py": script})
        wanted = {
            "name": "job",
            "script": "train.py",
            "code_sha256": sha256,
            "min_workers": 1,
            "max_workers": 1,
        } | changes.pop("spec", {})
        spec = common_pb2.JobSpec(**wanted)
        world_size = changes.pop("world_size", rank + 1)
        launch = Launch(
            id=common_pb2.WorkerId(job=job, run=run, rank=rank),
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_address="127.0.0.1",
            master_port=self.ports[0] if self.ports else 29500,
            spec=spec,
            plan=common_pb2.Plan(id=1, run=run, shares=[1.0] * world_size, planner="even"),
        )
        launch.MergeFrom(Launch(**changes))
        self.send(launch=launch)
        return launch

    def status(self, job: str = "job-1", run: int = 1, rank: int = 0) -> common_pb2.WorkerStatus | None:
        return self.statuses.get((job, run, rank))

    def is_running(self, job: str = "job-1", run: int = 1, rank: int = 0) -> int:
        """Its pid, or 0."""
        status = self.status(job, run, rank)
        return status.pid if status and status.state == common_pb2.WORKER_STATE_RUNNING else 0

    def has_exited(self, job: str = "job-1", run: int = 1, rank: int = 0) -> common_pb2.WorkerStatus | None:
        status = self.status(job, run, rank)
        return status if status and status.state == common_pb2.WORKER_STATE_EXITED else None

    def printed(self, job: str = "job-1", run: int = 1, rank: int = 0) -> bytes:
        return self.output.get((job, run, rank), b"")

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[ControllerMessage]:
        first = (await anext(request_iterator)).register
        self.registers.append(first)
        if self.leader is not None:
            context.set_trailing_metadata(((LEADER_METADATA, self.leader),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this controller does not lead")
        if self.refusal is not None:
            await context.abort(*self.refusal)
        if first.token != self.token:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong join token")
        self._see(first.workers, first.rendezvous_ports)
        self._outgoing = asyncio.Queue()
        self.connected = True
        hearing = asyncio.create_task(self._hear(request_iterator, self._outgoing))
        try:
            yield ControllerMessage(
                registered=agents_pb2.Registered(
                    # A write that takes as long as the lease ends the stream: on a busy machine, too.
                    controller="scripted",
                    heartbeat_s=0.2,
                    lease_s=30.0,
                    pulse_s=self.pulse_s,
                )
            )
            while True:
                yield await self._outgoing.get()
        finally:
            hearing.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.UsageError):
                await hearing

    async def _hear(self, messages: Any, outgoing: asyncio.Queue[ControllerMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("body"):
                case "heartbeat":
                    self.heartbeats += 1
                    self._see(message.heartbeat.workers, message.heartbeat.rendezvous_ports)
                case "telemetry":
                    self.telemetry += message.telemetry.workers
                    self.samples += message.telemetry.devices
                case "log":
                    self._keep(message.log, outgoing)

    def _see(self, statuses: Any, ports: Any) -> None:
        self.statuses = {(s.id.job, s.id.run, s.id.rank): s for s in statuses}
        self.ports = tuple(ports)

    def _keep(self, log: agents_pb2.LogBatch, outgoing: asyncio.Queue[ControllerMessage]) -> None:
        key = (log.id.job, log.id.run, log.id.rank)
        have = self.output.get(key, b"")
        assert log.offset <= len(have), "the stream has no gaps"
        self.output[key] = have[: log.offset] + log.data
        if self.acks:
            ack = agents_pb2.LogAck(id=log.id, offset=len(self.output[key]))
            outgoing.put_nowait(ControllerMessage(log_ack=ack))

    async def FetchCode(self, request: Any, context: Any) -> AsyncIterator[agents_pb2.CodeChunk]:
        self.fetches += 1
        bundle = self.bundles.get(request.sha256)
        if bundle is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such code")
            return
        for at in range(0, len(bundle), 1000):
            yield agents_pb2.CodeChunk(data=bundle[at : at + 1000])


class RunningAgent:
    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(serve(settings, self.stop), name="agent")

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 60)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
