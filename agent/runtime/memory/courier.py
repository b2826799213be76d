"""Copies of shards on their way to other machines, behind everything that training itself sends.

A file goes in chunks, its first page last: until that is there, the copy says that it was not written to its end. The
holder says after each chunk how far it has come; the sender has a few chunks under way, and goes on from there when
nothing was heard for a while, also after a connection broke. Nothing is sent while training exchanges gradients."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash
import zmq

from atoll.agent.runtime.memory.slot import PAGE_BYTES
from atoll.agent.runtime.memory.store import CopyFiles
from atoll.agent.runtime.wire.keys import Gatekeeper, Keys, secure_client, secure_server
from atoll.errors import CheckpointError

CHUNK_BYTES: Final = 128 * 1024
WINDOW: Final = 4  # chunks under way: what training waits for at most when it begins to send
UNANSWERED_S: Final = 3.0
TELL_AFTER: Final = 10  # times without an answer
_HEARTBEAT_MS: Final = 5000
_TURN_MS: Final = 500
_END_S: Final = 5.0
_MAGIC: Final = b"ATMC"
_CHUNK: Final = struct.Struct("<4sQQIQQQ")  # magic, run, step, owner, position, total, xxh3 of the payload
_REACHED: Final = struct.Struct("<4sQQQ")  # magic, run, step, position


@dataclass(frozen=True, slots=True)
class Parcel:
    """A sealed file that is to be copied. It does not change before all ranks have said that they are done."""

    step: int
    path: Path
    total: int  # bytes of the file that count


@dataclass(slots=True)
class _Outgoing:
    """One holder: how far it has come with the present parcel."""

    socket: zmq.Socket[bytes]
    rank: int
    sent: int = 0
    reached: int = 0
    silent_s: float = 0.0  # since something came back, without the time in which nothing was to be sent
    unanswered: int = 0  # times that it was sent again


@dataclass(slots=True)
class _Incoming:
    """One owner: how far its present copy has come here."""

    files: CopyFiles
    step: int = 0
    total: int = 0
    reached: int = 0
    done_step: int = 0


class Courier:
    """bind, exchange endpoints, start; then send, hold, release; close is the owner's duty always."""

    def __init__(
        self,
        *,
        run: int,
        rank: int,
        keys: Keys | None,
        incoming: Mapping[int, CopyFiles],
        limit_bytes: int,
        tell: Callable[[str], None],
    ) -> None:
        """keys: None sends in the clear. incoming: by owner, where its copies go. limit_bytes: no file is longer.
        tell: what people should know, called on the courier's thread."""
        self._run, self._rank, self._keys = run, rank, keys
        self._limit_bytes, self._tell = limit_bytes, tell
        self._incoming = {owner: _Incoming(files) for owner, files in incoming.items()}
        self._outgoing: dict[int, _Outgoing] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._gatekeeper: Gatekeeper | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._ends = self._held_back = False
        self._next: Parcel | None = None
        self._parcel: Parcel | None = None
        self._file = -1
        self.sent_bytes = 0
        self.failed: CheckpointError | None = None
        """Why copies of others cannot be kept here."""
        self.dropped: Counter[str] = Counter()
        """Messages that were not taken, by reason."""

    def bind(self, host: str) -> str:
        """Listen; the endpoint for those whose copies come here."""
        if self._keys is not None:
            self._gatekeeper = Gatekeeper(self._context, self._keys)
            secure_server(self._router, self._keys)
        for option, value in (
            (zmq.MAXMSGSIZE, CHUNK_BYTES + 4096),
            (zmq.RCVHWM, 2 * WINDOW),
            (zmq.LINGER, 0),
            (zmq.ROUTER_HANDOVER, 1),  # who connects again is the same one
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.IPV6, int(":" in host)),
        ):
            self._router.setsockopt(option, value)
        self._router.bind(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
        bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    def start(self, endpoints: Sequence[str], holders: Sequence[int]) -> None:
        """endpoints: by rank. holders: who gets this rank's copies."""
        for rank in holders:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            for option, value in (
                (zmq.SNDHWM, WINDOW),
                (zmq.LINGER, 0),
                (zmq.MAXMSGSIZE, 4096),
                (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
                (zmq.IPV6, int("[" in endpoints[rank])),
            ):
                socket.setsockopt(option, value)
            socket.setsockopt(zmq.ROUTING_ID, b"r%d" % self._rank)
            if self._keys is not None:
                secure_client(socket, self._keys, rank)
            socket.connect(endpoints[rank])
            self._outgoing[rank] = _Outgoing(socket, rank)
        self._thread = threading.Thread(target=self._loop, name="atoll-copies", daemon=True)
        self._thread.start()

    @property
    def sends(self) -> bool:
        return bool(self._outgoing)

    @property
    def done_step(self) -> int | None:
        """The newest step of which every copy that belongs here is whole; None where none belongs here."""
        return min((one.done_step for one in self._incoming.values()), default=None)

    def send(self, parcel: Parcel) -> None:
        """Copy this one; the one before is done, or given up. From any thread."""
        self._next = parcel
        os.eventfd_write(self._wake, 1)

    def hold(self) -> None:
        """Training is about to send: nothing more leaves until `release`."""
        self._held_back = True

    def release(self) -> None:
        if self._held_back:
            self._held_back = False
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._ends = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(_END_S)
            if self._thread.is_alive():
                return  # its sockets cannot be closed under it
        for outgoing in self._outgoing.values():
            outgoing.socket.close(linger=0)
        self._router.close(linger=0)
        if self._gatekeeper is not None:
            self._gatekeeper.socket.close(linger=0)
        self._context.term()
        os.close(self._wake)
        self._drop_parcel()
        for incoming in self._incoming.values():
            incoming.files.close()

    # --- the courier's thread

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        for outgoing in self._outgoing.values():
            poller.register(outgoing.socket, zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.socket, zmq.POLLIN)
        turned_s = time.monotonic()
        while not self._ends:
            ready = dict(poller.poll(_TURN_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._gatekeeper is not None and self._gatekeeper.socket in ready:
                self._gatekeeper.answer()
            if self._router in ready:
                self._receive()
            for outgoing in self._outgoing.values():
                if outgoing.socket in ready:
                    self._hear(outgoing)
            self._take_parcel()
            now_s = time.monotonic()
            turn_s, turned_s = now_s - turned_s, now_s
            for outgoing in self._outgoing.values():
                self._push(outgoing, turn_s)

    def _take_parcel(self) -> None:
        parcel, self._next = self._next, None
        if parcel is None:
            return
        self._drop_parcel()
        try:
            self._file = os.open(parcel.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._tell(f"the copy of step {parcel.step} cannot be read: {error.strerror}")
            return
        self._parcel = parcel
        for outgoing in self._outgoing.values():
            outgoing.sent = outgoing.reached = 0
            outgoing.silent_s = 0.0

    def _drop_parcel(self) -> None:
        self._parcel = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _push(self, outgoing: _Outgoing, turn_s: float) -> None:
        """Send what the window lets through; again from what the holder has when it has said nothing for long."""
        parcel = self._parcel
        if parcel is None or outgoing.reached == parcel.total or self._held_back:
            return
        outgoing.silent_s += turn_s
        if outgoing.silent_s > UNANSWERED_S:
            outgoing.sent, outgoing.silent_s = outgoing.reached, 0.0
            outgoing.unanswered += 1
            if outgoing.unanswered == TELL_AFTER:
                silent_s = UNANSWERED_S * TELL_AFTER
                self._tell(f"rank {outgoing.rank} takes no copy of this rank's state: no answer for {silent_s:.0f} s")
        ahead = min(parcel.total, outgoing.reached + WINDOW * CHUNK_BYTES)
        while outgoing.sent < ahead and not self._held_back:
            place, length = place_of(outgoing.sent, parcel.total)
            payload = os.pread(self._file, length, place)
            digest = xxhash.xxh3_64_intdigest(payload)
            head = _CHUNK.pack(_MAGIC, self._run, parcel.step, self._rank, outgoing.sent, parcel.total, digest)
            try:
                outgoing.socket.send_multipart([head, payload], zmq.NOBLOCK)
            except zmq.Again:
                return  # not connected, or its queue is full: the next turn tries again
            outgoing.sent += length
            self.sent_bytes += length

    def _hear(self, outgoing: _Outgoing) -> None:
        while (message := _received(outgoing.socket)) is not None:
            parcel = self._parcel
            if len(message) != 1 or len(message[0].buffer) != _REACHED.size:
                self.dropped["malformed"] += 1
                continue
            magic, run, step, reached = _REACHED.unpack(message[0].buffer)
            if magic != _MAGIC or run != self._run or parcel is None or step != parcel.step:
                self.dropped["of another step"] += 1
            elif outgoing.reached <= reached <= outgoing.sent:
                outgoing.reached, outgoing.silent_s, outgoing.unanswered = reached, 0.0, 0

    def _receive(self) -> None:
        while (message := _received(self._router)) is not None:
            why = self._take(message)
            if why is not None:
                self.dropped[why] += 1

    def _take(self, message: Sequence[zmq.Frame]) -> str | None:
        """A chunk; why it was not taken."""
        if len(message) != 3 or len(message[1].buffer) != _CHUNK.size:
            return "malformed"
        magic, run, step, owner, position, total, digest = _CHUNK.unpack(message[1].buffer)
        incoming, payload = self._incoming.get(owner), message[2].buffer
        if magic != _MAGIC or run != self._run or incoming is None:
            return "not for this rank"
        if self._keys is not None and message[1].get("User-Id") != str(owner):
            return "in another rank's name"
        if not PAGE_BYTES < total <= self._limit_bytes or step < incoming.step or position >= total:
            return "makes no sense"
        if place_of(position, total)[1] != len(payload) or xxhash.xxh3_64_intdigest(payload) != digest:
            return "damaged"
        try:
            if step > incoming.step:
                incoming.files.begin(total, turn=0 < incoming.step == incoming.done_step)
                incoming.step, incoming.total, incoming.reached = step, total, 0
            if total != incoming.total:
                return "makes no sense"
            if position == incoming.reached and incoming.reached < total:
                incoming.files.put(payload, place_of(position, total)[0])
                incoming.reached += len(payload)
                if incoming.reached == total:
                    incoming.done_step = step
        except CheckpointError as error:
            self.failed = error
            return "no room"
        reached = _REACHED.pack(_MAGIC, run, step, incoming.reached)
        with suppress(zmq.Again):  # the next one says it too
            self._router.send_multipart([message[0].bytes, reached], zmq.NOBLOCK)
        return None


def place_of(position: int, total: int) -> tuple[int, int]:
    """Where in the file the chunk lies that is sent at `position`, and its length: the first page comes last."""
    body = total - PAGE_BYTES
    if position < body:
        return position + PAGE_BYTES, min(CHUNK_BYTES, body - position)
    return position - body, total - position


def _received(socket: zmq.Socket[bytes]) -> Sequence[zmq.Frame] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
