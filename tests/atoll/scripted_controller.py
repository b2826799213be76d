"""A JobService over real gRPC whose state the test writes; killed and started again at will, on one port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from atoll.network.rpc import LEADER_METADATA, SERVER_OPTIONS, Tls, server_credentials
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.jobs_pb2_grpc import JobServiceServicer, add_JobServiceServicer_to_server

ENDED = (pb.PHASE_DONE, pb.PHASE_FAILED, pb.PHASE_CANCELLED)
LOOK_EVERY_S = 0.01


@dataclass
class Script:
    """What the controller answers. Tests change it while it runs."""

    jobs: dict[str, pb.Job] = field(default_factory=dict)
    events: list[common.Event] = field(default_factory=list)
    output: dict[tuple[int, int], bytes] = field(default_factory=dict)
    checkpoints: dict[str, pb.CheckpointsReply] = field(default_factory=dict)
    plans: pb.PlansReply = field(default_factory=pb.PlansReply)
    curves: dict[str, pb.Curve] = field(default_factory=dict)
    nodes: pb.ListNodesReply = field(default_factory=pb.ListNodesReply)
    seen_at: str = "127.0.0.1"
    dials: bool = True
    leader: str = ""
    refuse: grpc.StatusCode | None = None
    silent: bool = False
    lose_submit_replies: int = 0
    submitted: dict[str, str] = field(default_factory=dict)
    headers: list[pb.SubmitHeader] = field(default_factory=list)
    code: bytes = b""
    calls: list[str] = field(default_factory=list)

    def add(self, job: str, phase: pb.Phase.ValueType = pb.PHASE_RUNNING, **fields: Any) -> pb.Job:
        spec = common.JobSpec(name=job, script="train.py", min_workers=1, max_workers=3)
        self.jobs[job] = pb.Job(id=job, spec=spec, phase=phase, run=1, submitted_unix_s=1.7e9, **fields)
        return self.jobs[job]

    def change(self, job: str, **fields: Any) -> None:
        after = pb.Job()
        after.CopyFrom(self.jobs[job])
        after.MergeFrom(pb.Job(**fields))
        self.jobs[job] = after

    def happened(self, job: str, name: str, text: str, level: common.Level.ValueType = common.LEVEL_INFO) -> None:
        kind = common.EventKind.Value(f"EVENT_KIND_{name}")
        sequence = 1 + sum(event.job == job for event in self.events)
        self.events.append(common.Event(sequence=sequence, unix_s=1.7e9, level=level, job=job, kind=kind, text=text))

    def write(self, data: bytes, run: int = 1, rank: int = 0) -> None:
        self.output[run, rank] = self.output.get((run, rank), b"") + data


class Servicer(JobServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def _enter(self, name: str, context: Any) -> None:
        self.script.calls.append(name)
        while self.script.silent:  # noqa: ASYNC110 - tests write it from their own thread
            await asyncio.sleep(LOOK_EVERY_S)
        if self.script.leader:
            context.set_trailing_metadata(((LEADER_METADATA, self.script.leader),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not the leader")
        if self.script.refuse:
            await context.abort(self.script.refuse, "as the test asked")

    async def _job(self, name: str, context: Any) -> pb.Job:
        if name not in self.script.jobs:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no job {name!r}. See `atoll jobs -a`")
        return self.script.jobs[name]

    async def Submit(self, request_iterator: Any, context: Any) -> pb.SubmitReply:
        await self._enter("Submit", context)
        header, code = pb.SubmitHeader(), b""
        async for part in request_iterator:
            if part.WhichOneof("part") == "header":
                header = part.header
            else:
                code += part.code
        job = self.script.submitted.setdefault(
            header.request_id, f"{header.spec.name}-{len(self.script.submitted):04d}"
        )
        self.script.headers.append(header)
        self.script.code = code
        if job not in self.script.jobs:
            self.script.add(job)
            self.script.jobs[job].spec.CopyFrom(header.spec)
        if self.script.lose_submit_replies > 0:
            self.script.lose_submit_replies -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
        return pb.SubmitReply(job=job)

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.Job:
        await self._enter("Get", context)
        return await self._job(request.job, context)

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListReply:
        await self._enter("List", context)
        return pb.ListReply(jobs=[j for j in self.script.jobs.values() if request.all or j.phase not in ENDED])

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Job]:
        await self._enter("Watch", context)
        last = None
        while last is None or last.phase not in ENDED:
            job = await self._job(request.job, context)
            if job != last:
                last = pb.Job()
                last.CopyFrom(job)
                yield last
            await asyncio.sleep(LOOK_EVERY_S)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.Job:
        await self._enter("Cancel", context)
        await self._job(request.job, context)
        self.script.change(request.job, phase=pb.PHASE_STOPPING, reason="cancelled by its user")
        return self.script.jobs[request.job]

    async def Adjust(self, request: pb.AdjustRequest, context: Any) -> pb.Job:
        await self._enter("Adjust", context)
        job = await self._job(request.job, context)
        if job.spec.strategy != "stale-sparse":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"job {job.id} has no sparsity")
        job.plan.id, job.plan.strategy_params = job.plan.id + 1, request.strategy_params
        pins = pb.Pins(strategy_params=request.strategy_params, total_batch=request.total_batch, shares=request.shares)
        job.pins.CopyFrom(pins)
        return job

    async def Plans(self, request: pb.PlansRequest, context: Any) -> pb.PlansReply:
        await self._enter("Plans", context)
        await self._job(request.job, context)
        return self.script.plans

    async def Logs(self, request: pb.LogsRequest, context: Any) -> AsyncIterator[pb.LogChunk]:
        await self._enter("Logs", context)
        await self._job(request.job, context)
        sent: dict[tuple[int, int], int] = {}
        while True:
            over = not request.follow or self.script.jobs[request.job].phase in ENDED
            for key, data in sorted(self.script.output.items()):
                run, rank = key
                if request.HasField("rank") and request.rank != rank:
                    continue
                if key not in sent:
                    lines = data.splitlines(keepends=True)[-request.tail_lines :] if request.tail_lines else [data]
                    sent[key] = len(data) - sum(map(len, lines))
                if fresh := data[sent[key] :]:
                    yield pb.LogChunk(run=run, rank=rank, data=fresh, offset=sent[key])
                    sent[key] = len(data)
            if over:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def Events(self, request: pb.EventsRequest, context: Any) -> AsyncIterator[common.Event]:
        await self._enter("Events", context)
        sent = 0
        while True:
            over = not request.follow or (request.job and self.script.jobs[request.job].phase in ENDED)
            fresh = [e for e in self.script.events if e.job == request.job and e.sequence > sent]
            for event in fresh:
                sent = event.sequence
                yield event
            if over:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def Curves(self, request: pb.CurvesRequest, context: Any) -> AsyncIterator[pb.Curve]:
        await self._enter("Curves", context)
        await self._job(request.job, context)
        for name in request.names or sorted(self.script.curves):
            yield self.script.curves[name]

    async def Checkpoints(self, request: pb.CheckpointsRequest, context: Any) -> pb.CheckpointsReply:
        await self._enter("Checkpoints", context)
        job = await self._job(request.job, context)
        return self.script.checkpoints.get(job.id, pb.CheckpointsReply(job=job.id))

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveReply:
        await self._enter("Remove", context)
        job = await self._job(request.job, context)
        del self.script.jobs[job.id]
        return pb.RemoveReply(job=job.id, notes=["kept"] if request.keep_checkpoints else [])

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesReply:
        await self._enter("ListNodes", context)
        return self.script.nodes

    async def DialBack(self, request: pb.DialBackRequest, context: Any) -> pb.DialBackReply:
        await self._enter("DialBack", context)
        if self.script.dials:
            _, writer = await asyncio.open_connection("127.0.0.1", request.port)
            writer.close()
        return pb.DialBackReply(address=self.script.seen_at)


class ScriptedController:
    """Used with `with`. `kill` ends every stream without a word; `start` listens on the same port again."""

    def __init__(self, tls: Tls | None = None, script: Script | None = None) -> None:
        self.script = script or Script()
        self.port = 0
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted controller")
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.script.silent = False
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def start(self) -> None:
        async def started() -> None:
            self._server = grpc.aio.server(options=SERVER_OPTIONS)
            add_JobServiceServicer_to_server(Servicer(self.script), self._server)
            address = f"127.0.0.1:{self.port}"
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, server_credentials(self._tls))
            await self._server.start()

        self._do(started())

    def kill(self) -> None:
        async def ended() -> None:
            if self._server is not None:
                await self._server.stop(0)
                self._server = None

        self._do(ended())

    def wait_for(self, condition: Callable[[Script], object], deadline_s: float = 60.0) -> None:
        """Wait until the condition holds for what was asked of this controller."""

        async def holds() -> None:
            async with asyncio.timeout(deadline_s):
                while not condition(self.script):  # noqa: ASYNC110 - tests write it from their own thread
                    await asyncio.sleep(LOOK_EVERY_S)

        self._do(holds(), deadline_s + 10)

    def _do(self, coroutine: Coroutine[Any, Any, None], deadline_s: float = 40.0) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(deadline_s)
