"""Talk to Atoll's controllers from Python: submit jobs, see what became of them, follow them over restarts.

    async with AsyncClient(["head:7700"], tls=tls) as client:
        job = await client.submit(spec, code)
        async for seen in client.watch(job): ...

`Client` is the same without `await`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from atoll.client.leader_connection import Leader
from atoll.errors import BadInput, DeadlineExceeded, NotFound
from atoll.host.ports import DEFAULT_ADDRESS
from atoll.network.rpc import CODE_CHUNK_BYTES, MAX_CODE_BYTES, Tls
from atoll.strategies.declaration import as_json
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

CLOSE_S: Final = 10.0
ENDED: Final = frozenset({pb.PHASE_DONE, pb.PHASE_FAILED, pb.PHASE_CANCELLED})

REMOVE_ANSWER_S: Final = 90.0  # the controller waits up to 75 s for its nodes
CHECKPOINTS_ANSWER_S: Final = 15.0  # the controller waits up to 10 s for an object store
DIAL_BACK_ANSWER_S: Final = 10.0  # the controller dials for up to 3 s
_SLOWEST_LINK_BYTES_PER_S: Final = 128 * 1024

_T = TypeVar("_T")
_P = ParamSpec("_P")

if TYPE_CHECKING:
    from atoll.client.leader_connection import Stream
    from atoll.v1.jobs_pb2_grpc import JobServiceAsyncStub


class AsyncClient:
    """A connection to the controllers of one cluster; whichever leads is found and followed.

    controllers: HOST:PORT of one or more; without them what ATOLL_CONTROLLER and ATOLL_TLS_DIR say, as for the command.
    tls: required wherever the controller has certificates. timeout_s: how long
    a call may look for a leading controller before it raises ControllerUnreachable; streams have it anew after each
    break. Every method may raise NotAllowed, BadInput, NotFound and ControllerUnreachable.
    """

    def __init__(
        self, controllers: Sequence[str] | None = None, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> None:
        if controllers is None:
            controllers = os.environ.get("ATOLL_CONTROLLER", DEFAULT_ADDRESS).split(",")
            tls = tls or Tls.of_environment()
        self._leader = Leader(controllers, tls, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; streams that are open end."""
        await self._leader.close()

    async def checkpoints(self, job: str) -> pb.CheckpointsReply:
        """Return a job's checkpoints in all tiers, and the nodes that could not be asked."""
        return await self._leader.call(
            f"checkpoints of {job}",
            lambda stub, s: stub.Checkpoints(pb.CheckpointsRequest(job=job), timeout=max(s, CHECKPOINTS_ANSWER_S)),
        )

    async def submit(self, spec: common.JobSpec, code: bytes, request_id: str | None = None) -> str:
        """Hand a job over; return its id once the cluster will not lose it.

        code: the bundle (`atoll.jobs.code_bundle.pack`), at most 8 MiB. request_id: a repeated submit with the same
        one returns the same job.
        """
        if len(code) > MAX_CODE_BYTES:
            raise BadInput(f"code bundle of {len(code)} bytes exceeds {MAX_CODE_BYTES}. Ship data by other ways")
        full = common.JobSpec()
        full.CopyFrom(spec)
        full.code_sha256 = hashlib.sha256(code).hexdigest()
        return await self._submit(pb.SubmitHeader(spec=full, request_id=request_id or uuid.uuid4().hex), code)

    async def submit_alike(self, spec: common.JobSpec, code_of: str, request_id: str | None = None) -> str:
        """Submit a job with the code, and the offline profile, of another one; return its id. Raises NotFound if the
        other one was removed."""
        return await self._submit(
            pb.SubmitHeader(spec=spec, request_id=request_id or uuid.uuid4().hex, code_of=code_of), b""
        )

    async def _submit(self, header: pb.SubmitHeader, code: bytes) -> str:
        async def parts() -> AsyncIterator[pb.SubmitRequest]:
            yield pb.SubmitRequest(header=header)
            for start in range(0, len(code), CODE_CHUNK_BYTES):
                yield pb.SubmitRequest(code=code[start : start + CODE_CHUNK_BYTES])

        transfer_s = len(code) / _SLOWEST_LINK_BYTES_PER_S
        reply = await self._leader.call("submit", lambda stub, s: stub.Submit(parts(), timeout=s + transfer_s))
        return reply.job

    async def get(self, job: str) -> pb.Job:
        """The job with this id, or the newest of this name."""
        return await self._leader.call(f"job {job}", lambda stub, s: stub.Get(pb.GetRequest(job=job), timeout=s))

    async def jobs(self, *, ended: bool = False) -> list[pb.Job]:
        """Living jobs; with `ended` also those that are over."""
        reply = await self._leader.call("list jobs", lambda stub, s: stub.List(pb.ListRequest(all=ended), timeout=s))
        return list(reply.jobs)

    async def cancel(self, job: str) -> pb.Job:
        """Ask for the job's end. Workers are gone within 5 s, or when they have saved; `watch` shows it."""
        request = pb.CancelRequest(job=job)
        return await self._leader.call(f"cancel {job}", lambda stub, s: stub.Cancel(request, timeout=s))

    async def remove(self, job: str, *, keep_checkpoints: bool = False) -> pb.RemoveReply:
        """Remove a job that is over, with its logs and, unless they are to be kept, its checkpoints. The reply's notes
        say what stays on nodes that are gone. Raises Conflict where it lives or not all could be removed."""
        job = (await self.get(job)).id
        request = pb.RemoveRequest(job=job, keep_checkpoints=keep_checkpoints)
        try:
            return await self._leader.call(
                f"remove {job}", lambda stub, s: stub.Remove(request, timeout=max(s, REMOVE_ANSWER_S))
            )
        except NotFound:  # it was there a moment ago: the answer to an earlier try was lost
            return pb.RemoveReply(job=job)

    async def adjust(
        self,
        job: str,
        *,
        params: Mapping[str, Any] | None = None,
        total_batch: int = 0,
        shares: Sequence[float] = (),
        strategy: str = "",
        unpin: Sequence[str] = (),
    ) -> pb.Job:
        """Pin values of a running job: the controller decides them no more, in later runs neither.

        params: what plans tell the job's strategy, e.g. {"sparsity": 0.995}. total_batch: samples of a step of all
        ranks. shares: of the batch, one per rank of the present run, which alone keeps them. strategy: for which the
        run leaves its own at a step boundary. unpin: "strategy", "total-batch", "shares" or one of `params`, to leave
        to the controller again. The returned job's plan says from which step it holds. Raises Conflict for a job that
        does not run, BadInput for values that do not fit it.
        """
        request = pb.AdjustRequest(
            job=job,
            strategy_params=as_json(params or {}),
            total_batch=total_batch,
            shares=shares,
            strategy=strategy,
            unpin=unpin,
        )
        return await self._leader.call(f"adjust {job}", lambda stub, s: stub.Adjust(request, timeout=s))

    async def plans(self, job: str, run: int = 0) -> pb.PlansReply:
        """Return what was decided about the job's newest run, or another: its plans, oldest first, with what each was
        decided from; devices that offered themselves (admissions); and the placement of copies of its state, if any."""
        return await self._leader.call(
            f"plans of {job}", lambda stub, s: stub.Plans(pb.PlansRequest(job=job, run=run), timeout=s)
        )

    async def nodes(self) -> pb.ListNodesReply:
        """The nodes and what runs on them; also which controller answered, its version and clock."""
        return await self._leader.call("list nodes", lambda stub, s: stub.ListNodes(pb.ListNodesRequest(), timeout=s))

    async def watch(self, job: str) -> AsyncGenerator[pb.Job, None]:
        """Yield the job now and after every change, until it has ended, also over controller restarts."""
        last = await self.get(job)
        yield last
        if last.phase in ENDED:
            return
        request = pb.WatchRequest(job=last.id)

        async def ended() -> bool:
            await self.get(request.job)
            return last.phase in ENDED

        stream = self._leader.stream(f"watch {job}", lambda stub, s: stub.Watch(request, timeout=s), ended)
        async with aclosing(stream):
            async for seen in stream:
                if seen != last:
                    last = seen
                    yield seen

    async def wait(self, job: str, timeout_s: float) -> pb.Job:
        """The job once it has ended. Raises DeadlineExceeded after timeout_s; the job goes on."""
        last = pb.Job()
        try:
            async with asyncio.timeout(timeout_s), aclosing(self.watch(job)) as changes:
                async for last in changes:  # noqa: B007 - the last one counts
                    pass
        except TimeoutError as error:
            raise DeadlineExceeded(f"job {job} did not end within {timeout_s:g} s. It goes on") from error
        return last

    async def events(self, job: str = "", *, follow: bool = False) -> AsyncGenerator[common.Event, None]:
        """Yield the events of a job, or of the cluster; each once, in order, also over controller restarts."""
        job = (await self.get(job)).id if job else ""
        doing, request, newest = f"events of {job or 'the cluster'}", pb.EventsRequest(job=job, follow=follow), 0

        async def ended() -> bool:
            if job:
                return await self._has_ended(job)
            await self.nodes()
            return False

        stream = self._leader.stream(doing, lambda stub, s: stub.Events(request, timeout=s), ended, follow=follow)
        async with aclosing(stream):
            async for event in stream:
                if event.sequence > newest:
                    newest = event.sequence
                    yield event

    async def logs(
        self, job: str, *, rank: int | None = None, follow: bool = False, tail_lines: int = 0
    ) -> AsyncGenerator[pb.LogChunk, None]:
        """Yield the output of the workers; no byte twice and none lost over controller restarts.

        rank: of this worker alone; None for all. tail_lines: the newest lines of each; 0 for all that is kept.
        """
        job, received = (await self.get(job)).id, LogPosition()

        def start(stub: JobServiceAsyncStub, deadline_s: float) -> Stream[pb.LogChunk]:
            tail = 0 if received.anything else tail_lines
            received.new_stream()
            return stub.Logs(pb.LogsRequest(job=job, rank=rank, follow=follow, tail_lines=tail), timeout=deadline_s)

        stream = self._leader.stream(f"logs of {job}", start, partial(self._has_ended, job), follow=follow)
        async with aclosing(stream):
            async for chunk in stream:
                if fresh := received.only_new(chunk):
                    yield fresh

    async def curves(self, job: str, names: Sequence[str] = (), *, most_points: int = 0) -> list[pb.Curve]:
        """Return the numbers that the script reported by run.report, as curves by step.

        names: those alone; all if empty. most_points: of each, spread evenly; 0: all that are kept. Raises NotFound
        for a name that was never reported.
        """
        request = pb.CurvesRequest(job=job, names=names, most_points=most_points)
        stream = self._leader.stream(
            f"curves of {job}",
            lambda stub, s: stub.Curves(request, timeout=s),
            partial(self._has_ended, job),
            follow=False,
        )
        async with aclosing(stream):
            found = {curve.name: curve async for curve in stream}  # a stream that broke begins again
        return list(found.values())

    async def dial_back(self, port: int) -> str:
        """Let the controller dial this machine at `port`, once. Returns the address that it dialled."""
        request = pb.DialBackRequest(port=port)
        reply = await self._leader.call(
            "dial back", lambda stub, s: stub.DialBack(request, timeout=max(s, DIAL_BACK_ANSWER_S))
        )
        return reply.address

    async def _has_ended(self, job: str) -> bool:
        return (await self.get(job)).phase in ENDED


class LogPosition:
    """End of what was delivered of each worker's output, so that a stream that starts again repeats nothing."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._in_this_stream: dict[tuple[int, int], int] = {}
        self._first_run = 0

    @property
    def anything(self) -> bool:
        return bool(self._next)

    def new_stream(self) -> None:
        self._in_this_stream = {}
        self._first_run = min((run for run, _ in self._next), default=0)

    def only_new(self, chunk: pb.LogChunk) -> pb.LogChunk | None:
        """The part of the chunk that was not delivered yet; None if all was."""
        key = (chunk.run, chunk.rank)
        if chunk.run < self._first_run:
            return None
        start = chunk.offset if chunk.HasField("offset") else self._in_this_stream.get(key, 0)
        end = start + len(chunk.data)
        self._in_this_stream[key] = end
        had = self._next.get(key, start)
        if end <= had:
            return None
        self._next[key] = end
        if start >= had:
            return chunk
        return pb.LogChunk(run=chunk.run, rank=chunk.rank, data=chunk.data[had - start :], offset=had)


def _awaited(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Client, _P], _T]:
    @wraps(method)
    def call(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._runner.run(method(self._client, *args, **kwargs))

    return call


def _iterated(
    method: Callable[Concatenate[AsyncClient, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate[Client, _P], Iterator[_T]]:
    @wraps(method)
    def each(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        stream = method(self._client, *args, **kwargs)

        async def following() -> _T | None:
            return await anext(stream, None)

        try:
            while (message := self._runner.run(following())) is not None:
                yield message
        finally:
            self._runner.run(_close(stream))

    return each


class _LoopThread:
    """An event loop on a thread of its own, so that who waits for it may have one, as notebooks do."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="atoll-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of the work. An interrupted wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class Client:
    """`AsyncClient` for code that does not wait by `await`, also inside a running event loop. Used with `with`."""

    def __init__(
        self, controllers: Sequence[str] | None = None, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> None:
        self._client = AsyncClient(controllers, tls=tls, timeout_s=timeout_s)
        self._runner = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and the event loop."""
        try:
            self._runner.run(self._client.close())
        finally:
            self._runner.close()

    submit = _awaited(AsyncClient.submit)
    submit_alike = _awaited(AsyncClient.submit_alike)
    checkpoints = _awaited(AsyncClient.checkpoints)
    get = _awaited(AsyncClient.get)
    jobs = _awaited(AsyncClient.jobs)
    cancel = _awaited(AsyncClient.cancel)
    remove = _awaited(AsyncClient.remove)
    adjust = _awaited(AsyncClient.adjust)
    plans = _awaited(AsyncClient.plans)
    nodes = _awaited(AsyncClient.nodes)
    curves = _awaited(AsyncClient.curves)
    dial_back = _awaited(AsyncClient.dial_back)
    wait = _awaited(AsyncClient.wait)
    watch = _iterated(AsyncClient.watch)
    events = _iterated(AsyncClient.events)
    logs = _iterated(AsyncClient.logs)


async def _close(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()
