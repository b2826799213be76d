"""JobService: what users call. Thin: checks, asks the leader epoch, answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import suppress
from importlib.metadata import version
from typing import Final
from urllib.parse import unquote

from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch
from atoll.controller.jobs.model.offline_profile import spec_from_wire
from atoll.controller.jobs.records.code_bundles import check_bundle
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.jobs.records.wire import event_to_wire
from atoll.controller.services.curves import MAX_CURVES, CurveStore
from atoll.controller.services.gate import Context, KnownLeader, caller
from atoll.controller.services.inventory import checkpoints, remove
from atoll.controller.services.logs import READ_BYTES, LogStore, RankLog, run
from atoll.controller.services.views import job_to_wire, node_to_wire, plans_to_wire
from atoll.controller.state import keys
from atoll.controller.state.records import JobPins
from atoll.errors import BadInput, ControllerUnreachable, DeadlineExceeded, NotFound
from atoll.jobs import job_spec
from atoll.network.rpc import CODE_CHUNK_BYTES, MAX_CODE_BYTES, split_address
from atoll.strategies import registry
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.jobs_pb2_grpc import JobServiceServicer

FOLLOW_INTERVAL_S: Final = 0.25
SUBMIT_DEADLINE_S: Final = 120.0
LAST_WORDS_S: Final = 1.0
"""A worker's last output may arrive a little after its end."""
PINS: Final = frozenset({"strategy", "total-batch", "shares"})
"""Parameters that a user can pin, beside the plan parameters of the job's strategy."""
ENDED: Final = (pb.PHASE_DONE, pb.PHASE_FAILED, pb.PHASE_CANCELLED)
DIAL_S: Final = 3.0
_LOWEST_PORT: Final = 1024
"""Lowest port that is dialled, so that nodes cannot probe a gateway's own services."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class JobServicer(JobServiceServicer):
    """Streams poll the memory of this process, four times a second: cheap, and nothing to miss."""

    def __init__(
        self, known_leader: KnownLeader, logs: LogStore, curves: CurveStore, executor: Executor, disk: Executor
    ) -> None:
        self._known_leader = known_leader
        self._logs, self._curves, self._disk = logs, curves, disk
        self._executor = executor

    async def Submit(self, request_iterator: AsyncIterator[pb.SubmitRequest], context: Context) -> pb.SubmitReply:
        epoch = self._known_leader.leading()
        try:
            async with asyncio.timeout(SUBMIT_DEADLINE_S):
                header = await _header(request_iterator)
                if known := await epoch.requested(header.request_id):
                    return pb.SubmitReply(job=known)
                if header.code_of:
                    return await self._submit_alike(epoch, header, caller(context))
                spec = spec_from_wire(header.spec)
                code = await _code(request_iterator)
                await asyncio.get_running_loop().run_in_executor(self._executor, check_bundle, spec, code)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the code bundle did not arrive within {SUBMIT_DEADLINE_S:.0f} s") from error
        return pb.SubmitReply(job=await epoch.submit(spec, header.request_id, code, caller(context)))

    async def _submit_alike(self, epoch: LeaderEpoch, header: pb.SubmitHeader, by: str) -> pb.SubmitReply:
        """A job with the code of another one, which may be over, and with its offline profile, and its secrets where it
        names them without a value."""
        other = epoch.ledger.find(header.code_of).job.spec
        header.spec.code_sha256 = other.code_sha256
        if other.adapt.profile and header.spec.strategy == other.strategy:
            header.spec.adapt.profile = other.adapt.profile
        of_other = job_spec.to_wire(other, reveal=True).secrets
        for name, value in list(header.spec.secrets.items()):
            header.spec.secrets[name] = value or of_other.get(name, "")
        spec = spec_from_wire(header.spec)
        code = b"".join(await epoch.code.chunks(spec.code_sha256))
        return pb.SubmitReply(job=await epoch.submit(spec, header.request_id, code, by))

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.Job:
        epoch = self._known_leader.leading()
        return job_to_wire(epoch, epoch.ledger.find(request.job))

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListReply:
        epoch = self._known_leader.leading()
        states = sorted(epoch.ledger.jobs.values(), key=lambda state: state.created)
        return pb.ListReply(jobs=[job_to_wire(epoch, s) for s in states if request.all or not s.job.status.phase.ended])

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]
        epoch = self._known_leader.leading()
        name, last = epoch.ledger.find(request.job).job.id, None
        while True:
            job = job_to_wire(epoch, self._still(epoch, name))
            if job != last:
                await context.write(job)
                last = job
            if job.phase in ENDED:  # what was sent, not what it has become meanwhile
                return
            await _next_poll(epoch)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.Job:
        epoch = self._known_leader.leading()
        return job_to_wire(epoch, await epoch.cancel(request.job, caller(context)))

    async def Remove(self, request: pb.RemoveRequest, context: Context) -> pb.RemoveReply:
        epoch = self._known_leader.leading()
        return await remove(epoch, request.job, keep_checkpoints=request.keep_checkpoints, by=caller(context))

    async def Adjust(self, request: pb.AdjustRequest, context: Context) -> pb.Job:
        epoch = self._known_leader.leading()
        state = epoch.ledger.find(request.job)
        job, strategy = state.job, registry.find(request.strategy or state.strategy)
        where = f"job {job.id} of strategy {strategy.name}: strategy_params"
        asked = JobPins(
            strategy_params=strategy.read_plan_parameters(request.strategy_params, where).said(),
            total_batch=request.total_batch,
            shares=tuple(request.shares),
            strategy=strategy.name if request.strategy else "",
        )
        adjustable = strategy.plan_parameters.adjustable()
        if own := sorted(set(asked.strategy_params).difference(adjustable)):
            raise BadInput(f"{where}.{own[0]} is for the controller alone to say. Leave it out")
        known = {*PINS, *adjustable}
        if unknown := sorted(set(request.unpin) - known):
            raise BadInput(f"unpin = {unknown[0][:80]!r} is not known. Use {', '.join(sorted(known))}")
        if asked == JobPins() and not request.unpin:
            raise BadInput(
                "the request changes nothing. Give a strategy, one of its settings, a batch, shares or --unpin"
            )
        return job_to_wire(epoch, await epoch.adjust(request.job, asked, set(request.unpin), caller(context)))

    async def Plans(self, request: pb.PlansRequest, context: Context) -> pb.PlansReply:
        epoch = self._known_leader.leading()
        job = epoch.ledger.find(request.job).job
        run = request.run or job.status.run
        plans, placement = await epoch.ledger.plans(job.id, run), await epoch.ledger.placement(job.id, run)
        admissions = await epoch.ledger.admissions(job.id, run)
        return plans_to_wire(epoch.progress.of(job.id, run), plans, placement, admissions)

    async def Events(self, request: pb.EventsRequest, context: Context) -> None:  # type: ignore[override]
        epoch = self._known_leader.leading()
        name = epoch.ledger.find(request.job).job.id if request.job else keys.CLUSTER
        sent = 0
        while True:
            self._check_still(epoch)
            state = epoch.ledger.find(name) if request.job else None
            newest = state.job.status.events if state else epoch.ledger.cluster_events
            if newest > sent:
                for event in await epoch.ledger.events(name, after=sent):
                    await context.write(event_to_wire(event))
                    sent = event.sequence
            if not request.follow or (state and state.job.status.phase.ended and state.job.status.events <= sent):
                return
            await _next_poll(epoch)

    async def Logs(self, request: pb.LogsRequest, context: Context) -> None:  # type: ignore[override]
        epoch = self._known_leader.leading()
        job = epoch.ledger.find(request.job).job
        wanted = request.rank if request.HasField("rank") else None
        if wanted is not None and wanted >= job.spec.max_workers:
            raise NotFound(f"job {job.id} has no rank {wanted}, at most {job.spec.max_workers} workers")
        readers: dict[int, _Reader] = {}
        quiet_since_s = time.monotonic()
        while True:
            await run(self._disk, self._find_readers, readers, job.id, wanted, request.tail_lines)
            over = not request.follow or self._still(epoch, job.id).job.status.phase.ended
            for reader in readers.values():
                while chunk := await run(self._disk, reader.next_chunk, not over):
                    await context.write(chunk)
                    quiet_since_s = time.monotonic()
            if not request.follow or (over and time.monotonic() - quiet_since_s > LAST_WORDS_S):
                return
            await _next_poll(epoch)

    async def Curves(self, request: pb.CurvesRequest, context: Context) -> None:  # type: ignore[override]
        job = self._known_leader.leading().ledger.find(request.job).job.id
        if len(request.names) > MAX_CURVES:
            raise BadInput(f"names has {len(request.names)} entries, a job has at most {MAX_CURVES} curves")
        names = await run(self._disk, self._curves.names, job)
        if unknown := [name for name in request.names if name not in names]:
            reported = ", ".join(names[:16]) or "nothing yet"
            raise NotFound(f"job {job} reports no {unknown[0][:80]!r}, but {reported}")
        for name in request.names or names:
            kept = await run(self._disk, self._curves.read, job, name, request.most_points)
            await context.write(
                pb.Curve(name=name, steps=kept.steps, values=kept.values, runs=kept.runs, unix_s=kept.unix_s)
            )

    def _find_readers(self, known: dict[int, _Reader], job: str, wanted: int | None, tail_lines: int) -> None:
        """Add those of ranks that have printed something since."""
        for rank in self._logs.ranks(job):
            if wanted in (None, rank) and rank not in known:
                known[rank] = _Reader(rank, self._logs.rank(job, rank), tail_lines)

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesReply:
        epoch = self._known_leader.leading()
        nodes = epoch.sessions.nodes()
        return pb.ListNodesReply(
            nodes=[node_to_wire(epoch, nodes[name]) for name in sorted(nodes)],
            controller=epoch.settings.controller,
            version=version("atoll"),
            unix_s=time.time(),
        )

    async def Checkpoints(self, request: pb.CheckpointsRequest, context: Context) -> pb.CheckpointsReply:
        epoch = self._known_leader.leading()
        return await checkpoints(epoch, epoch.ledger.find(request.job))

    async def DialBack(self, request: pb.DialBackRequest, context: Context) -> pb.DialBackReply:
        return await dial_back(request.port, context.peer())

    def _still(self, epoch: LeaderEpoch, name: str) -> JobState:
        self._check_still(epoch)
        return epoch.ledger.find(name)

    def _check_still(self, epoch: LeaderEpoch) -> None:
        """Each turn of a stream begins with it: once the leader epoch is over, `_next_poll` waits no more."""
        if (
            self._known_leader.leading() is not epoch
        ):  # it led, did not, and leads again: what it mirrors is another epoch's
            raise ControllerUnreachable("this controller leads anew; ask again")


class _Reader:
    """Reads one rank's log on, in whole lines as long as more may come. Used by the thread of logs alone."""

    def __init__(self, rank: int, log: RankLog, tail_lines: int) -> None:
        self._rank = rank
        self._log = log
        self._at = log.tail(tail_lines) if tail_lines else log.begin
        self._held: int | None = None

    def next_chunk(self, whole_lines: bool) -> pb.LogChunk | None:
        piece = self._log.read(self._at)
        if piece is None:
            return None
        data = piece.data
        if whole_lines and piece.next_at == self._log.end and not data.endswith(b"\n") and len(data) < READ_BYTES:
            data = data[: data.rfind(b"\n") + 1]
            if not data and self._held != piece.next_at:  # wait once for the rest of the line
                self._held = piece.next_at
                return None
            data = data or piece.data
        self._at = piece.next_at - len(piece.data) + len(data)
        return pb.LogChunk(run=piece.run, rank=self._rank, data=data, offset=piece.offset)


async def _next_poll(epoch: LeaderEpoch) -> None:
    """A quarter of a second, or at once when the leader epoch is over."""
    try:
        async with asyncio.timeout(FOLLOW_INTERVAL_S):
            await epoch.over.wait()
    except TimeoutError:
        return


async def _header(requests: AsyncIterator[pb.SubmitRequest]) -> pb.SubmitHeader:
    async for request in requests:
        if request.WhichOneof("part") != "header":
            break
        if not _REQUEST_ID.fullmatch(request.header.request_id):
            shown = request.header.request_id[:80]
            raise BadInput(f"header.request_id = {shown!r} must be 1 to 64 of letters, digits, '.', '_' and '-'")
        return request.header
    raise BadInput("the first message of Submit must be the header. Send the spec before the code")


async def _code(requests: AsyncIterator[pb.SubmitRequest]) -> bytes:
    code = bytearray()
    async for request in requests:
        if request.WhichOneof("part") != "code":
            raise BadInput("Submit takes one header; all messages after it must carry code")
        if len(request.code) > CODE_CHUNK_BYTES:
            raise BadInput(f"a code message has {len(request.code)} bytes, at most {CODE_CHUNK_BYTES} are taken")
        code += request.code
        if len(code) > MAX_CODE_BYTES:
            raise BadInput(f"the code bundle has more than {MAX_CODE_BYTES} bytes. Leave data out of it")
    return bytes(code)


async def dial_back(port: int, peer: str) -> pb.DialBackReply:
    """Dial that port at the address of the caller, and nowhere else. The reply does not say if it came through: the
    caller sees that, and learns nothing of others' ports. peer: as gRPC names it. Raises BadInput."""
    if not _LOWEST_PORT <= port < 2**16:
        raise BadInput(f"port = {port} must be {_LOWEST_PORT} to 65535: the one on which you listen")
    address = address_of(peer)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            await writer.wait_closed()
    return pb.DialBackReply(address=address)


def address_of(peer: str) -> str:
    """'ipv4:10.0.0.1:4242' and 'ipv6:%5Bfd00::2%5D:4242' -> the address. Raises BadInput for what is of no network."""
    kind, _, where = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        raise BadInput(f"a caller at {peer[:80]!r} has no address that could be dialled")
    return split_address(where)[0].removeprefix("::ffff:")
