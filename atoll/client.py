"""Talk to Atoll's controllers from Python: submit jobs, see what became of them, follow them over restarts.

    async with AsyncClient(["head:7700"], tls=tls) as client:
        job = await client.submit(spec, code)
        async for seen in client.watch(job): ...

`Client` is the same for code that has no event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar

import grpc
import grpc.aio

from atoll.errors import AtollError, BadInput, ControllerUnreachable, DeadlineExceeded, NotAllowed
from atoll.handshakes import certificate_problem, ended_at_once, refused_in_silence
from atoll.rpc import (
    CODE_CHUNK_BYTES,
    DEFAULT_PORT,
    MAX_CODE_BYTES,
    Tls,
    leader_hint,
    open_channel,
    split_address,
    translate,
)
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.jobs_pb2_grpc import JobServiceStub

DEFAULT_CONTROLLER: Final = f"127.0.0.1:{DEFAULT_PORT}"
ENDED: Final = frozenset({pb.PHASE_DONE, pb.PHASE_FAILED, pb.PHASE_CANCELLED})

# Every call may be repeated (Submit has its request id), so whatever says "nobody did it" is tried again.
_TRY_AGAIN: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
)
_BACKOFF_S: Final = (0.1, 1.0)
_STREAM_LIFE_S: Final = 300.0  # a stream is opened anew after this long: none can hang for ever unnoticed
_SLOWEST_LINK_BYTES_PER_S: Final = 128 * 1024

_T = TypeVar("_T")

if TYPE_CHECKING:
    from atoll.v1.jobs_pb2_grpc import JobServiceAsyncStub

    _Stream: TypeAlias = grpc.aio.UnaryStreamCall[Any, _T]


class AsyncClient:
    """A connection to the controllers of one cluster; whichever leads is found and followed.

    controllers: HOST:PORT of one or more. tls: required wherever the controller has certificates. timeout_s: how long
    a call may look for a leading controller before it raises ControllerUnreachable; streams have it anew after each
    break. Every method may raise NotAllowed, BadInput, NotFound and ControllerUnreachable.
    """

    def __init__(
        self, controllers: Sequence[str] = (DEFAULT_CONTROLLER,), *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> None:
        if not controllers:
            raise BadInput("no controller named. Give HOST:PORT of at least one")
        if not timeout_s > 0:
            raise BadInput(f"timeout = {timeout_s} s must be positive. Leave it out for 10")
        self._addresses = [_normal(address) for address in controllers]
        self._current = self._addresses[0]
        self._tls = tls
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; streams that are open end."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def submit(self, spec: common.JobSpec, code: bytes, request_id: str | None = None) -> str:
        """Hand a job over; return its id once the cluster will not lose it.

        code: the bundle (`atoll.bundle.pack`), at most 8 MiB. request_id: whoever repeats a submit whose answer was
        lost passes the same one and gets the same job.
        """
        if len(code) > MAX_CODE_BYTES:
            raise BadInput(f"code bundle of {len(code)} bytes exceeds {MAX_CODE_BYTES}. Ship data by other ways")
        full = common.JobSpec()
        full.CopyFrom(spec)
        full.code_sha256 = hashlib.sha256(code).hexdigest()
        header = pb.SubmitHeader(spec=full, request_id=request_id or uuid.uuid4().hex)

        async def parts() -> AsyncIterator[pb.SubmitRequest]:
            yield pb.SubmitRequest(header=header)
            for start in range(0, len(code), CODE_CHUNK_BYTES):
                yield pb.SubmitRequest(code=code[start : start + CODE_CHUNK_BYTES])

        transfer_s = len(code) / _SLOWEST_LINK_BYTES_PER_S
        reply = await self._call("submit", lambda stub, s: stub.Submit(parts(), timeout=s + transfer_s))
        return reply.job

    async def get(self, job: str) -> pb.Job:
        """The job with this id, or the newest of this name."""
        return await self._call(f"job {job}", lambda stub, s: stub.Get(pb.GetRequest(job=job), timeout=s))

    async def jobs(self, *, ended: bool = False) -> list[pb.Job]:
        """Living jobs; with `ended` also those that are over."""
        reply = await self._call("list jobs", lambda stub, s: stub.List(pb.ListRequest(all=ended), timeout=s))
        return list(reply.jobs)

    async def cancel(self, job: str) -> pb.Job:
        """Ask for the job's end. Workers are gone within 5 s; `watch` shows it."""
        return await self._call(f"cancel {job}", lambda stub, s: stub.Cancel(pb.CancelRequest(job=job), timeout=s))

    async def adjust(
        self,
        job: str,
        *,
        rate: float | None = None,
        total_batch: int = 0,
        shares: Sequence[float] = (),
        unpin: Sequence[str] = (),
    ) -> pb.Job:
        """Pin values of a running job: the controller decides them no more, in later runs neither.

        rate: share of the entries that a step leaves behind, 0 to 0.9999 (strategy stale-sparse). total_batch: samples
        of a step of all ranks. shares: of the batch, one per rank of the present run, which alone keeps them. unpin:
        "rate", "total-batch" or "shares", to leave to the controller again. The returned job's plan says from which
        step it holds. Raises Conflict for a job that does not run, BadInput for values that do not fit it.
        """
        request = pb.AdjustRequest(job=job, rate=rate, total_batch=total_batch, shares=shares, unpin=unpin)
        return await self._call(f"adjust {job}", lambda stub, s: stub.Adjust(request, timeout=s))

    async def plans(self, job: str, run: int = 0) -> list[pb.DecidedPlan]:
        """The plans of the job's newest run, or of another, oldest first, with what each was decided from."""
        reply = await self._call(
            f"plans of {job}", lambda stub, s: stub.Plans(pb.PlansRequest(job=job, run=run), timeout=s)
        )
        return list(reply.plans)

    async def nodes(self) -> pb.ListNodesReply:
        """The nodes and what runs on them; also which controller answered, its version and clock."""
        return await self._call("list nodes", lambda stub, s: stub.ListNodes(pb.ListNodesRequest(), timeout=s))

    async def watch(self, job: str) -> AsyncGenerator[pb.Job, None]:
        """The job now, then after every change, until it has ended. Goes on over controller restarts."""
        last = await self.get(job)
        yield last
        doing, request = f"watch {job}", pb.WatchRequest(job=last.id)
        breaks = _Breaks(self._timeout_s)
        while last.phase not in ENDED:
            stream = self._one_stream(doing, breaks, lambda stub, s: stub.Watch(request, timeout=s))
            async with aclosing(stream):
                async for seen in stream:
                    if seen != last:
                        last = seen
                        yield seen
            if last.phase not in ENDED:
                await self.get(last.id)

    async def events(self, job: str = "", *, follow: bool = False) -> AsyncGenerator[common.Event, None]:
        """Events of a job, or of the cluster; each once, in order, also over controller restarts."""
        job = (await self.get(job)).id if job else ""
        doing, request = f"events of {job or 'the cluster'}", pb.EventsRequest(job=job, follow=follow)
        breaks, newest = _Breaks(self._timeout_s), 0
        while True:
            stream = self._one_stream(doing, breaks, lambda stub, s: stub.Events(request, timeout=s))
            async with aclosing(stream):
                async for event in stream:
                    if event.sequence > newest:
                        newest = event.sequence
                        yield event
            if breaks.ended_well and (not follow or (job and await self._has_ended(job))):
                return
            await (self.get(job) if job else self.nodes())

    async def logs(
        self, job: str, *, rank: int | None = None, follow: bool = False, tail_lines: int = 0
    ) -> AsyncGenerator[pb.LogChunk, None]:
        """Output of the workers; no byte twice and none lost over controller restarts.

        rank: only this one's; all where None. tail_lines: only the newest lines of each; 0 = all that is kept.
        """
        job = (await self.get(job)).id
        doing, breaks, had = f"logs of {job}", _Breaks(self._timeout_s), _LogPosition()
        while True:
            tail = 0 if had.anything else tail_lines
            had.new_stream()
            request = pb.LogsRequest(job=job, rank=rank, follow=follow, tail_lines=tail)
            stream = self._one_stream(doing, breaks, partial(_open_logs, request))
            async with aclosing(stream):
                async for chunk in stream:
                    if fresh := had.only_new(chunk):
                        yield fresh
            if breaks.ended_well and (not follow or await self._has_ended(job)):
                return
            await self.get(job)

    async def _has_ended(self, job: str) -> bool:
        return (await self.get(job)).phase in ENDED

    async def _call(self, doing: str, attempt: Callable[[JobServiceAsyncStub, float], Awaitable[_T]]) -> _T:
        """One unary call, tried at whoever may lead until it is answered or timeout_s has passed."""
        ends = time.monotonic() + self._timeout_s
        pause_s, hinted = _BACKOFF_S[0], False
        while True:
            # With several controllers one that hangs must leave time for the others.
            left_s = max(0.05, ends - time.monotonic())
            try:
                return await attempt(self._stub(), left_s if len(self._addresses) == 1 else max(1.0, left_s / 2))
            except grpc.aio.AioRpcError as error:
                self._raise_if_final(error, doing)
                if time.monotonic() >= ends:
                    raise self._unreachable(doing, error) from error
                hint = leader_hint(error)
                if hint and not hinted:
                    self._current, hinted = hint, True
                    continue
                self._next_address()
                hinted = False
            await asyncio.sleep(min(random.uniform(pause_s / 2, pause_s), max(0.0, ends - time.monotonic())))
            pause_s = min(2 * pause_s, _BACKOFF_S[1])

    async def _one_stream(
        self, doing: str, breaks: _Breaks, start: Callable[[JobServiceAsyncStub, float], _Stream[_T]]
    ) -> AsyncGenerator[_T, None]:
        """Whatever one stream gives; then `breaks.ended_well` says whether the server ended it or it broke."""
        opened, delivered = time.monotonic(), False
        breaks.ended_well = False
        call = start(self._stub(), _STREAM_LIFE_S)
        try:
            async for message in call:
                delivered = True
                yield message
            breaks.ended_well = True
        except grpc.aio.AioRpcError as error:
            self._raise_if_final(error, doing)
            if hint := leader_hint(error):
                self._current = hint
            lived_s = time.monotonic() - opened
            if breaks.too_long(healthy=delivered or lived_s > 2.0):
                raise self._unreachable(doing, error) from error
        finally:
            call.cancel()
        if not (breaks.ended_well and delivered):
            await asyncio.sleep(random.uniform(_BACKOFF_S[0] / 2, _BACKOFF_S[0]))

    def _raise_if_final(self, error: grpc.aio.AioRpcError, doing: str) -> None:
        if why := certificate_problem(error.details() or ""):
            raise NotAllowed(f"{doing}: {self._current}: {why}") from error
        if error.code() not in _TRY_AGAIN:
            raise translate(error, doing, self._current) from error

    def _unreachable(self, doing: str, error: grpc.aio.AioRpcError) -> AtollError:
        details = error.details() or error.code().name
        if ended_at_once(details):
            return NotAllowed(f"{doing}: {self._current} {refused_in_silence(self._tls)}")
        # gRPC lists how it failed from the outside in; users need the innermost: "Connection refused".
        cause = details.rpartition(": ")[2]
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            cause = "it does not answer"
        where = ", ".join(self._addresses)
        return ControllerUnreachable(
            f"{doing}: no leading controller at {where} within {self._timeout_s:g} s: {cause}. "
            "Start one with `atoll up`, name the right one with --controller HOST:PORT, or see `atoll doctor`"
        )

    def _next_address(self) -> None:
        known = self._addresses
        here = known.index(self._current) if self._current in known else -1
        self._current = known[(here + 1) % len(known)]

    def _stub(self) -> JobServiceAsyncStub:
        if self._current not in self._channels:
            self._channels[self._current] = open_channel(self._current, self._tls)
        return JobServiceStub(self._channels[self._current])


class Client:
    """`AsyncClient` for code without an event loop. Used with `with`; not from several threads."""

    def __init__(
        self, controllers: Sequence[str] = (DEFAULT_CONTROLLER,), *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> None:
        self._client = AsyncClient(controllers, tls=tls, timeout_s=timeout_s)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and the event loop."""
        try:
            self._run(self._client.close())
        finally:
            self._runner.close()

    def submit(self, spec: common.JobSpec, code: bytes, request_id: str | None = None) -> str:
        """See AsyncClient.submit."""
        return self._run(self._client.submit(spec, code, request_id))

    def get(self, job: str) -> pb.Job:
        """See AsyncClient.get."""
        return self._run(self._client.get(job))

    def jobs(self, *, ended: bool = False) -> list[pb.Job]:
        """See AsyncClient.jobs."""
        return self._run(self._client.jobs(ended=ended))

    def cancel(self, job: str) -> pb.Job:
        """See AsyncClient.cancel."""
        return self._run(self._client.cancel(job))

    def adjust(
        self,
        job: str,
        *,
        rate: float | None = None,
        total_batch: int = 0,
        shares: Sequence[float] = (),
        unpin: Sequence[str] = (),
    ) -> pb.Job:
        """See AsyncClient.adjust."""
        adjusting = self._client.adjust(job, rate=rate, total_batch=total_batch, shares=shares, unpin=unpin)
        return self._run(adjusting)

    def plans(self, job: str, run: int = 0) -> list[pb.DecidedPlan]:
        """See AsyncClient.plans."""
        return self._run(self._client.plans(job, run))

    def nodes(self) -> pb.ListNodesReply:
        """See AsyncClient.nodes."""
        return self._run(self._client.nodes())

    def watch(self, job: str) -> Iterator[pb.Job]:
        """See AsyncClient.watch."""
        return self._each(self._client.watch(job))

    def events(self, job: str = "", *, follow: bool = False) -> Iterator[common.Event]:
        """See AsyncClient.events."""
        return self._each(self._client.events(job, follow=follow))

    def logs(
        self, job: str, *, rank: int | None = None, follow: bool = False, tail_lines: int = 0
    ) -> Iterator[pb.LogChunk]:
        """See AsyncClient.logs."""
        return self._each(self._client.logs(job, rank=rank, follow=follow, tail_lines=tail_lines))

    def wait(self, job: str, timeout_s: float) -> pb.Job:
        """The job once it has ended. Raises DeadlineExceeded after timeout_s; the job goes on."""

        async def last() -> pb.Job:
            seen = pb.Job()
            async for seen in self._client.watch(job):  # noqa: B007 - the last one counts
                pass
            return seen

        try:
            return self._run(asyncio.wait_for(last(), timeout_s))
        except TimeoutError as error:
            raise DeadlineExceeded(f"job {job} did not end within {timeout_s:g} s. It goes on") from error

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(coroutine)

    def _each(self, stream: AsyncGenerator[_T, None]) -> Iterator[_T]:
        async def following() -> tuple[bool, _T | None]:
            try:
                return True, await anext(stream)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, message = self._run(following())
                if not more or message is None:
                    return
                yield message
        finally:
            self._run(_close(stream))


@dataclass(slots=True)
class _Breaks:
    """How the streams of one subscription ended, and for how long they have been breaking at once."""

    patience_s: float
    ended_well: bool = False
    failing_since_s: float | None = None

    def too_long(self, *, healthy: bool) -> bool:
        """Note one break; whether streams have broken without a sign of life for longer than patience_s."""
        if healthy:
            self.failing_since_s = None
            return False
        now_s = time.monotonic()
        if self.failing_since_s is None:
            self.failing_since_s = now_s
        return now_s - self.failing_since_s > self.patience_s


class _LogPosition:
    """How far each worker's output was delivered, so that a stream that starts over repeats nothing."""

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


def _open_logs(request: pb.LogsRequest, stub: JobServiceAsyncStub, deadline_s: float) -> _Stream[pb.LogChunk]:
    return stub.Logs(request, timeout=deadline_s)


async def _close(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()


def _normal(address: str) -> str:
    host, port = split_address(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
