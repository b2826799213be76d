"""Sends copies of shards to other machines, with less priority than everything that training sends.

A file is sent in chunks, its first page last; until that arrives, the copy is marked as unfinished. The holder
acknowledges each chunk. The sender keeps as many chunks under way as fill the link. It resumes from the acknowledged
position when a chunk is lost, when no answer comes for a while, and after a connection broke.

Nothing is sent while training uses the links. In an idle span only what fits into it is sent (`idle_spans`). Where
links are never idle, a chunk is sent now and then. Beside an exchange that needs its link, copies have a share of the
link (`link_share`), which they use while no byte of the exchange is under way."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Final

import zmq

from atoll.agent.runtime.checkpoints.memory.cost.cadence import ThreadTime
from atoll.agent.runtime.checkpoints.memory.replication.idle_spans import IdleSpans, allowance, overdue
from atoll.agent.runtime.checkpoints.memory.replication.link_share import CopyAge, LinkShare
from atoll.agent.runtime.checkpoints.memory.replication.path_model import CHUNKS_PER_WINDOW, MAX_CHUNK_BYTES
from atoll.agent.runtime.checkpoints.memory.replication.replica_transfer import (
    FileChunk,
    IncomingReplica,
    OutgoingReplica,
    ReplicaTransfer,
)
from atoll.agent.runtime.checkpoints.memory.replication.sealing import Sealer
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import ShardFiles
from atoll.agent.runtime.transport.keys import KEY_BYTES, Keys
from atoll.agent.runtime.transport.meter import LinksInUse
from atoll.errors import BadInput, CheckpointError
from atoll.host.ports import host_and_port

_HEARTBEAT_MS: Final = 5000
"""Milliseconds between heartbeats of a connection."""
_MAX_TURN_S: Final = 0.5
"""Seconds that the thread sleeps at most."""
_MIN_TURN_S: Final = 0.02
"""Seconds between looks at whether anything of the exchange is under way, which no event tells."""
_MAX_END_S: Final = 5.0
"""Seconds in which the thread must end."""
_MAX_QUEUED_CHUNKS: Final = 128
"""Chunks in a socket's queue; the window bounds them anyway."""
_MAX_ANSWER_BYTES: Final = 4096
"""The largest acknowledgement."""
_MAX_HEAD_BYTES: Final = 4096
"""Bytes of a message beside its chunk: head and seal."""
_BULK_SERVICE: Final = 0x08
"""The type of service for throughput: the kernel's own queue (pfifo_fast) sends everything else before it."""
_MAX_EVENTS: Final = 4096
"""Events that wait for the thread."""
_THREAD_PREFIX: Final = 5
"""Prefix of the names of ZeroMQ's threads, which tells them from the threads of training's own traffic."""
_STARVED_AFTER_S: Final = 1.0
"""Seconds without an idle link after which a chunk leaves all the same."""
_STARVED_SHARE: Final = 0.005
"""Share of a link's time that copies have although training never leaves it idle: else they would never arrive."""


class _Event(Enum):
    BUSY = 0
    IDLE = 1
    BOUNDARY = 2


class ReplicaSender:
    """bind, exchange what `bind` gave, start; then send, pause, resume, boundary; close is the owner's duty always."""

    def __init__(
        self,
        *,
        run: int,
        rank: int,
        keys: Keys,
        incoming: Mapping[int, ShardFiles],
        limit_bytes: int,
        notify: Callable[[str], None],
        links_in_use: Callable[[], LinksInUse | None] = lambda: None,
    ) -> None:
        """incoming: by owner, where its copies go. limit_bytes: no file is longer. notify: what people should know,
        links_in_use: the connections of an exchange that may use all of a link; both called on the sender's thread."""
        self._run, self._rank = run, rank
        self._limit_bytes, self._notify, self._links_in_use = limit_bytes, notify, links_in_use
        self._sealer = Sealer(run, rank, keys)
        self._files = dict(incoming)
        self._incoming: dict[int, IncomingReplica] = {}
        self._outgoing: dict[int, OutgoingReplica] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.THREAD_NAME_PREFIX, _THREAD_PREFIX)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._ends = self._paused = False
        self._next: ReplicaTransfer | None = None
        self._transfer: ReplicaTransfer | None = None
        self._file = -1
        self._spans = IdleSpans()
        self._events: deque[tuple[_Event, float]] = deque(maxlen=_MAX_EVENTS)
        self._allowed: tuple[object, int] = (None, 0)  # for what, bytes
        self._left_s = 0.0  # when the last chunk left, or the present transfer came
        self._share = LinkShare()
        self._use: LinksInUse | None = None
        self._arrived_bytes = 0  # of copies, when that was last looked at
        self._age = CopyAge()
        self._turn_s = _MAX_TURN_S
        self._worked_s = self._told_work_s = 0.0  # of processor time
        self._delays_s = self._told_delays_s = 0.0  # of exchanges, by copies
        self._io: ThreadTime | None = None
        self.failed: CheckpointError | None = None
        """Why copies of others cannot be kept here."""
        self.copied_beside: Counter[int] = Counter()
        """Bytes of copies that the link carried while the exchange was busy, by the peer that it was so with."""
        self.dropped: Counter[str] = Counter()
        """Messages that were not taken, by reason."""

    def bind(self, host: str) -> bytes:
        """Listen; what those need to be told whose copies come here, or go from here."""
        for option, value in (
            (zmq.MAXMSGSIZE, MAX_CHUNK_BYTES + _MAX_HEAD_BYTES),
            (zmq.RCVHWM, CHUNKS_PER_WINDOW),
            (zmq.LINGER, 0),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.IPV6, int(":" in host)),
        ):
            self._router.setsockopt(option, value)
        self._router.bind(f"tcp://{host_and_port(host, 0)}")
        bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return self._sealer.ephemeral + bound.rstrip(b"\0")

    def start(self, hellos: Sequence[bytes], holders: Sequence[int]) -> None:
        """hellos: what `bind` gave on each rank. holders: who gets this rank's copies. Raises NotAllowed, BadInput."""
        for owner, files in self._files.items():
            seals = self._sealer.meet(owner, hellos[owner][:KEY_BYTES])
            self._incoming[owner] = IncomingReplica(files, run=self._run, seals=seals, limit_bytes=self._limit_bytes)
        for holder in holders:
            seals = self._sealer.meet(holder, hellos[holder][:KEY_BYTES])
            socket = self._connected(hellos[holder][KEY_BYTES:].decode(errors="replace"))
            self._outgoing[holder] = OutgoingReplica(
                socket, run=self._run, rank=self._rank, holder=holder, seals=seals, notify=self._notify
            )
        self._io = ThreadTime(f"{_THREAD_PREFIX}/ZMQ")
        self._spans.idle(time.monotonic())
        self._thread = threading.Thread(target=self._loop, name="atoll-copies", daemon=True)
        self._thread.start()

    def _connected(self, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, _MAX_QUEUED_CHUNKS),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.TOS, _BULK_SERVICE),
            (zmq.IPV6, int("[" in endpoint)),
        ):
            socket.setsockopt(option, value)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise BadInput(f"copies cannot go to {endpoint[:100]!r}: {error}") from error
        return socket

    @property
    def sends(self) -> bool:
        return bool(self._outgoing)

    @property
    def sent_bytes(self) -> int:
        return sum(outgoing.sent_bytes for outgoing in self._outgoing.values())

    @property
    def done_step(self) -> int | None:
        """The newest step of which every copy that belongs here is whole; None where none belongs here."""
        return min((one.done_step for one in self._incoming.values()), default=None)

    def processor_s(self) -> float:
        """Return the processor time, in seconds, that copies in both directions took since the last call."""
        worked_s = self._worked_s + (self._io.seconds() if self._io is not None else 0.0)
        since_s, self._told_work_s = worked_s - self._told_work_s, worked_s
        return since_s

    def delay_s(self) -> float:
        """Return by how many seconds copies delayed exchanges of training since the last call.

        An exchange is late by the bytes of copies that are queued on the link when it begins."""
        delays_s = self._delays_s
        since_s, self._told_delays_s = delays_s - self._told_delays_s, delays_s
        return since_s

    def send(self, transfer: ReplicaTransfer) -> None:
        """Copy this one; the one before is done, or given up. From any thread."""
        self._next = transfer
        os.eventfd_write(self._wake, 1)

    def pause(self) -> None:
        """Training is about to send: nothing more leaves until `resume`. From any thread."""
        if not self._paused:
            self._paused = True
            self._events.append((_Event.BUSY, time.monotonic()))

    def resume(self) -> None:
        """The links are idle again. From any thread."""
        if self._paused:
            self._paused = False
            self._events.append((_Event.IDLE, time.monotonic()))
            os.eventfd_write(self._wake, 1)

    def boundary(self) -> None:
        """A step ends."""
        self._events.append((_Event.BOUNDARY, time.monotonic()))

    def close(self) -> None:
        self._ends = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(_MAX_END_S)
            if self._thread.is_alive():
                return  # its sockets cannot be closed under it
        for outgoing in self._outgoing.values():
            outgoing.socket.close(linger=0)
        self._router.close(linger=0)
        self._context.term()
        os.close(self._wake)
        self._end_transfer()
        for files in self._files.values():
            files.close()

    # --- the sender's thread

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        for outgoing in self._outgoing.values():
            poller.register(outgoing.socket, zmq.POLLIN)
        turned_s = time.monotonic()
        while not self._ends:
            ready = dict(poller.poll(round(1000 * self._turn_s)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._router in ready:
                self._receive()
            for outgoing in self._outgoing.values():
                if outgoing.socket in ready:
                    self._hear(outgoing)
            self._learn()
            self._begin_transfer()
            now_s = time.monotonic()
            turn_s, turned_s = now_s - turned_s, now_s
            self._look(now_s)
            self._push(now_s, turn_s)
            self._worked_s = time.thread_time()

    def _learn(self) -> None:
        while self._events:
            event, at_s = self._events.popleft()
            match event:
                case _Event.BUSY:
                    self._spans.busy(at_s)
                    self._delays_s += sum(one.path.queued_s for one in self._outgoing.values() if not self._shares(one))
                case _Event.IDLE:
                    self._spans.idle(at_s)
                case _Event.BOUNDARY:
                    self._spans.boundary()

    def _begin_transfer(self) -> None:
        transfer = self._next
        if transfer is None:
            return
        self._next = None  # nobody sends another before this one is done: nothing is forgotten in between
        self._end_transfer()
        try:
            self._file = os.open(transfer.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._notify(f"the copy of step {transfer.step} cannot be read: {error.strerror}")
            return
        self._transfer, self._left_s = transfer, time.monotonic()
        self._age.begin(self._left_s)
        for outgoing in self._outgoing.values():
            outgoing.begin(transfer)

    def _end_transfer(self) -> None:
        self._transfer = None
        for outgoing in self._outgoing.values():
            outgoing.begin(None)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _look(self, now_s: float) -> None:
        """Observe the exchange's connections, and what copies carried beside it."""
        use = self._use = self._links_in_use()
        if use is None or not use.busy_s:
            return
        self._share.observe(use.busy_s, use.left_bytes, now_s)
        arrived = sum(outgoing.arrived_bytes for holder, outgoing in self._outgoing.items() if holder in use.beyond)
        before, self._arrived_bytes = self._arrived_bytes, arrived
        if arrived > before and (beside := self._share.beside(arrived - before)) is not None:
            peer, carried = beside
            self.copied_beside[peer] += carried

    def _push(self, now_s: float, turn_s: float) -> None:
        """Send to one holder after the other, but do not wait for those that do not answer."""
        self._turn_s = _MAX_TURN_S
        for outgoing in self._outgoing.values():
            if outgoing.done or self._transfer is None:
                continue
            if not outgoing.under_way:
                self._share.mark()
            shares, starved = self._shares(outgoing), self._starved(outgoing, now_s)
            at_any_time = shares or starved
            if self._is_paused(at_any_time):
                return
            if shares:
                allowed = self._allowance_of_share(outgoing, now_s)
            else:
                allowed = outgoing.path.chunk_bytes if starved else self._allowance(outgoing, now_s)
            if allowed > 0 or outgoing.under_way:
                outgoing.waits(turn_s)
            left = outgoing.push(self._file, allowed, partial(self._is_paused, at_any_time), time.monotonic)
            if left:
                self._left_s = now_s
            if shares:
                self._share.spend(left)
                self._observe_age(now_s)
            elif not starved:
                self._allowed = (self._allowed[0], allowed - left)
            if not outgoing.silent:
                return

    def _shares(self, outgoing: OutgoingReplica) -> bool:
        """Return whether copies have a share of this link, because the exchange needs it."""
        use = self._use
        needed = use is not None and bool(use.busy_s) and outgoing.holder in use.beyond
        return needed and self._share.share is not None

    def _allowance_of_share(self, outgoing: OutgoingReplica, now_s: float) -> int:
        """Return the bytes that copies may take of a link that the exchange needs, in whole chunks."""
        assert self._use is not None
        bandwidth, chunk_bytes = outgoing.path.bandwidth, min(outgoing.path.chunk_bytes, max(outgoing.left_bytes, 1))
        if bandwidth is None:
            allowed = 0 if outgoing.under_way else chunk_bytes  # the first answer tells of the link
        else:
            waits = self._paused or self._use.waits
            allowed = self._share.allowed(bandwidth, outgoing.path.chunk_bytes, now_s, waits=waits)
            self._turn_s = min(max(self._share.missing_s(bandwidth, chunk_bytes), _MIN_TURN_S), _MAX_TURN_S)
        return allowed - allowed % chunk_bytes

    def _observe_age(self, now_s: float) -> None:
        share, transfer = self._share.share, self._transfer
        if share is None or transfer is None:
            return
        arrived = sum(one.reached_bytes for one in self._outgoing.values())
        text = self._age.observe(arrived, transfer.total * len(self._outgoing), share, now_s)
        if text is not None:
            self._notify(text)

    def _is_paused(self, at_any_time: bool) -> bool:
        return self._paused and not at_any_time

    def _starved(self, outgoing: OutgoingReplica, now_s: float) -> bool:
        """Return whether links were busy for so long that a chunk leaves all the same."""
        path = outgoing.path
        chunk_s = path.chunk_bytes / path.bandwidth if path.bandwidth is not None else 0.0
        return self._paused and now_s - self._left_s > max(_STARVED_AFTER_S, chunk_s / _STARVED_SHARE)

    def _allowance(self, outgoing: OutgoingReplica, now_s: float) -> int:
        """Planned once for a span, a holder and a transfer, and once more when the span lasts longer than ever."""
        spans, transfer = self._spans, self._transfer
        assert transfer is not None
        planned_for = (spans.idle_since_s, outgoing.holder, transfer.step, overdue(spans, now_s))
        if self._allowed[0] != planned_for:
            self._allowed = (planned_for, allowance(spans, outgoing.path, outgoing.left_bytes, now_s))
        return self._allowed[1]

    def _hear(self, outgoing: OutgoingReplica) -> None:
        while (message := _received(outgoing.socket)) is not None:
            self._drop(outgoing.hear(message, time.monotonic()))

    def _receive(self) -> None:
        while (message := _received(self._router)) is not None:
            self._drop(self._take(message))

    def _drop(self, why: str | None) -> None:
        if why is not None:
            self.dropped[why] += 1

    def _take(self, message: Sequence[zmq.Frame]) -> str | None:
        """A chunk; why it was not taken."""
        chunk = FileChunk.unpack(message[1].buffer) if len(message) == 3 else None
        if chunk is None:
            return "malformed"
        incoming = self._incoming.get(chunk.owner)
        if incoming is None or chunk.run != self._run:
            return "not for this rank"
        try:
            why = incoming.take(chunk, message[1], message[2])
        except CheckpointError as error:
            self.failed = error
            return "no room"
        if why is None:
            with suppress(zmq.Again):  # the next one says it too
                self._router.send_multipart([message[0].bytes, *incoming.answer(chunk)], zmq.NOBLOCK)
        return why


def _received(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
