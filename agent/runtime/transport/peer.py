"""The link to one peer: the connection that this rank sends on, what waits for it, and what its monitor says."""

from __future__ import annotations

import os
import socket
import time
from typing import Final

import zmq
from humanize import naturalsize
from zmq.utils.monitor import parse_monitor_message

from atoll.agent.runtime.transport.frames import MAX_PAYLOAD_BYTES, SHARED_MAGIC
from atoll.agent.runtime.transport.keys import Keys, secure_client
from atoll.agent.runtime.transport.limits import Limits
from atoll.agent.runtime.transport.meter import KernelCounts, Meter, kernel_counts
from atoll.agent.runtime.transport.pulse import Pulse
from atoll.agent.runtime.transport.sendqueue import EncodedFrame, SendQueue
from atoll.agent.runtime.transport.shared import PLACE, Arena, ArenaView
from atoll.agent.runtime.transport.topology import Member
from atoll.errors import NotAllowed, PeerLost

FRAMES_AT_ONCE: Final = 64
# What was handed to ZeroMQ can no longer be overtaken: about 10 ms of the link, within these bounds.
_AHEAD_S: Final = 0.01
_MIN_AHEAD_BYTES: Final = 64 * 1024
_MAX_AHEAD_BYTES: Final = 1024 * 1024
_UNSENT_BYTES: Final = 128 * 1024  # in the kernel, beyond what is on its way
_TCP_NOTSENT_LOWAT: Final = 25  # <netinet/tcp.h>; the socket module lacks it
_SHARE_FROM_BYTES: Final = 8 * 1024  # a shorter payload is cheaper inline
_COPY_BELOW_BYTES: Final = 256 * 1024  # copying is cheaper than asking for the buffer back from another thread
_RECONNECT_MS: Final = 50
_HEARTBEATS: Final = 1 / 4  # of the time that a peer may be silent, from one to the next
# After a disconnect: what the reconnect finds tells a process that is gone from one that is silent.
_JUDGE_S: Final = 0.3
_UNANSWERED_S: Final = 1.0
_FAILED_HANDSHAKES: Final = 5


class Peer:
    """Used by the wire's thread alone, but for `meter` and `in_use`. close() is idempotent."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        me: int,
        member: Member,
        address: str,
        keys: Keys | None,
        limits: Limits,
        deadline_s: float,
    ) -> None:
        self.member = member
        self.queue = SendQueue()
        self.meter = Meter()
        self.up = False  # this rank's connection has shaken hands
        self.greeted = False  # the peer's Hello came
        self.left = False  # it said goodbye
        self.gone = False  # likewise and its connection is closed; or it was given up
        self.trouble = "nothing was heard from it"
        self.arena: Arena | None = None  # towards it
        self.view: ArenaView | None = None  # from it
        self._local = address.startswith("ipc://")
        self._limits = limits
        self._connection: socket.socket | None = None  # a second handle of ZeroMQ's, to ask the kernel about it
        self._progress: tuple[int, tuple[int | None, int] | None] = (0, None)
        self._progress_s = 0.0
        self._pulse = Pulse(limits.silence_s * _HEARTBEATS, limits.silence_s * (1 - _HEARTBEATS))
        self._handed_bytes = (0, 0)  # the two latest batches: ZeroMQ may hold as much
        self._failed_handshakes = 0
        self._closed_s: float | None = None
        self._refused = self._answered = False
        self.dealer = _dealer(context, address, limits.silence_s, deadline_s)
        self.dealer.setsockopt(zmq.ROUTING_ID, identity(me))
        if keys is not None:
            secure_client(self.dealer, keys, member.rank)
        self.monitor = self.dealer.get_monitor_socket()
        self.dealer.connect(address)
        if self._local and limits.shared_bytes:
            self.arena = Arena(limits.shared_bytes)

    @property
    def ready(self) -> bool:
        return self.up and self.greeted

    def push(self, encoded: EncodedFrame, now_s: float) -> None:
        if self.gone:
            self.meter.drop("left")
            return
        self.queue.push(encoded, now_s)
        self.meter.busy(True, now_s)

    def flush(self) -> bool:
        """Hand over what ZeroMQ takes now; whether something waits on."""
        ahead = int(self.meter.goodput_bytes_per_s * _AHEAD_S)
        ahead = min(max(ahead, _MIN_AHEAD_BYTES), _MAX_AHEAD_BYTES)
        while self.queue and self.writable:
            parts: list[bytes | memoryview] = []
            batch = self.queue.pop(FRAMES_AT_ONCE, ahead)
            self._handed_bytes = (self._handed_bytes[1], sum(encoded.bytes for encoded in batch))
            for encoded in batch:
                parts += self._parts(encoded)
            try:
                self.dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
            except zmq.Again:  # the connection ended just now, with all that is on its way; the monitor tells of it
                self.meter.drop("left")
                break
        if self._local and not self.queue:
            self.meter.busy(False, time.monotonic())  # what was handed over is there
        return len(self.queue) > 0

    @property
    def writable(self) -> bool:
        return _can(self.dealer, zmq.POLLOUT)

    def _parts(self, encoded: EncodedFrame) -> tuple[bytes, bytes | memoryview]:
        self.meter.frames_sent += 1
        self.meter.bytes_sent += encoded.bytes
        if self.arena is not None and len(encoded.payload) >= _SHARE_FROM_BYTES:
            position = self.arena.put(encoded.payload)
            if position is not None:
                self.meter.bytes_shared += len(encoded.payload)
                return SHARED_MAGIC + encoded.header[len(SHARED_MAGIC) :], PLACE.pack(position)
        return encoded.header, encoded.payload

    def observe(self, now_s: float) -> bool:
        """Take what the monitor says; whether a handshake was just done. Raises NotAllowed where keys do not fit."""
        done = False
        while _can(self.monitor, zmq.POLLIN):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            done = self._on_event(int(event["event"]), int(event["value"]), now_s) or done
        return done

    def _on_event(self, event: int, value: int, now_s: float) -> bool:
        match event:
            case zmq.EVENT_CONNECTED:
                self._answered = self._closed_s is not None
                self._hold(value)
            case zmq.EVENT_CLOSED | zmq.EVENT_CLOSE_FAILED:
                self._refused = self._closed_s is not None
                if not self.up:
                    self.trouble = "nothing listens there"
            case zmq.EVENT_HANDSHAKE_SUCCEEDED if self._closed_s is None:
                self.up = True
                self._progress_s = now_s
                self.trouble = "it has not said hello"
                return True
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refused = True  # it lives, but what was on its way is lost
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise NotAllowed(
                    f"{self.member} does not admit this rank's CURVE key (it answered {value}). Were both given the "
                    "keys of the same run?"
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise NotAllowed(
                    f"{self.member} and this rank do not speak the same security mechanism (ZeroMQ error {value:#x}). "
                    "Give all workers of the run keys, or none"
                )
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if self._closed_s is None:
                self._failed_handshakes += 1
                self.trouble = "it closed the connection during the handshake; does it have other CURVE keys?"
                if self._failed_handshakes >= _FAILED_HANDSHAKES:
                    raise NotAllowed(
                        f"{self.member} closed the connection during the handshake {self._failed_handshakes} times: "
                        "its CURVE key is not the one this rank was told, or only one of both uses keys. Were both "
                        "given the keys of the same run?"
                    )
            case zmq.EVENT_DISCONNECTED if self.up and self._closed_s is None:
                self._closed_s = now_s
                self._release()
        return False

    def tick(self, now_s: float) -> None:
        """Several times a second: close a measuring window, and raise PeerLost where the peer is lost."""
        if self.gone:
            return
        counts = self._counts()
        self.meter.sample(counts)
        waits = counts is not None and counts.waiting_bytes > 0
        self.meter.busy(waits or len(self.queue) > 0, now_s)
        if self._closed_s is not None:
            self._judge(now_s - self._closed_s)
        if self.left or not self.up or self._closed_s is not None:
            return
        moved = (counts.acked_bytes, counts.waiting_bytes) if counts is not None else None
        progress = (self.meter.frames_sent, moved)
        if progress != self._progress or not (waits or self.queue):
            self._progress, self._progress_s = progress, now_s
        waited_s = self.queue.waited_s(now_s)
        if now_s - self._progress_s > self._limits.silence_s:
            raise PeerLost(f"{self.member}: takes no data; nothing has left for {self._limits.silence_s:g} s")
        if counts is not None and self._pulse.silent(counts, sum(self._handed_bytes), now_s):
            raise PeerLost(f"{self.member}: silent for {self._limits.silence_s:g} s")
        if waited_s > self._limits.leave_s:
            raise PeerLost(
                f"{self.member}: does not take data: {naturalsize(self.queue.bytes)} waited {waited_s:.0f} s. Where "
                "its link is that thin, a larger stall_timeout_s in the job file lets a step wait longer"
            )
        if self.queue.bytes > 4 * self._limits.send_buffer_bytes + MAX_PAYLOAD_BYTES:
            raise PeerLost(f"{self.member}: takes data too slowly: {naturalsize(self.queue.bytes)} wait for it")

    @property
    def empty(self) -> bool:
        """Nothing waits to leave, neither here nor, as far as one can see, in ZeroMQ or the kernel."""
        if self.gone or not self.up or self._closed_s is not None:
            return True
        counts = self._counts()
        return not self.queue and self.writable and (counts is None or counts.waiting_bytes == 0)

    def in_use(self) -> tuple[bool, float, int] | None:
        """Return whether data waits or is in flight, the busy seconds since the run began, and bytes sent. None if
        the peer is on this machine, or gone. From any thread."""
        if self._local or self.gone:
            return None
        counts = self._counts()
        if counts is None or counts.acked_bytes is None:
            return len(self.queue) > 0, self.meter.busy_s, self.meter.bytes_sent
        return len(self.queue) > 0 or counts.waiting_bytes > 0, counts.busy_s, counts.acked_bytes

    @property
    def is_given_up(self) -> bool:
        """True for a lost peer without which the others continue."""
        return self.gone and not self.left

    def give_up(self) -> None:
        """Send nothing more: the peer left, or is lost and the others continue without it."""
        self.gone = True
        self.queue.clear()

    def _judge(self, closed_for_s: float) -> None:
        if self.left:
            self.give_up()
            return
        if closed_for_s < _JUDGE_S:
            return  # its goodbye may still be on the way to us
        if self._refused:
            raise PeerLost(f"{self.member}: connection closed")
        if self._answered or closed_for_s >= _UNANSWERED_S:
            raise PeerLost(f"{self.member}: silent for {self._limits.silence_s:g} s")

    def _counts(self) -> KernelCounts | None:
        if (connection := self._connection) is None:
            return None
        try:
            return kernel_counts(connection)
        except (OSError, ValueError):  # the latter of one that the wire's thread has closed
            return None  # just closed; the monitor says so next

    def _hold(self, descriptor: int) -> None:
        self._release()
        try:
            self._connection = socket.socket(fileno=os.dup(descriptor))
            if self._connection.family != socket.AF_UNIX:
                self._connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        except OSError:
            self._release()  # closed again already

    def _release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close_sockets(self) -> None:
        """Close the sockets before the context ends."""
        self.dealer.disable_monitor()
        self.monitor.close(linger=0)

    def close(self) -> None:
        """Release the rest after the context ended, when ZeroMQ has flushed."""
        self._release()
        if self.arena is not None:
            self.arena.close()
        if self.view is not None:
            self.view.close()


def _dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, silence_s: float, deadline_s: float
) -> zmq.Socket[bytes]:
    """The socket towards `address`, not connected."""
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.SNDHWM, 1),
        (zmq.IMMEDIATE, 1),
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
        (zmq.RECONNECT_IVL, _RECONNECT_MS),
        (zmq.HEARTBEAT_IVL, max(int(1000 * silence_s * _HEARTBEATS), 1)),
        # Over TCP the kernel knows what is delivered, and `Pulse` judges: ZeroMQ's clock runs from when a heartbeat is
        # written, behind what is on its way.
        (zmq.HEARTBEAT_TIMEOUT, max(int(1000 * silence_s * (1 - _HEARTBEATS)), 1) if address.startswith("ipc") else 0),
        (zmq.HANDSHAKE_IVL, max(int(1000 * deadline_s), 1)),
        (zmq.TCP_MAXRT, max(int(1000 * deadline_s), 1)),
        (zmq.IPV6, int("[" in address)),
    ):
        dealer.setsockopt(option, value)
    dealer.copy_threshold = _COPY_BELOW_BYTES
    return dealer


def identity(rank: int) -> bytes:
    """A connection's name at the receiver; under CURVE it must agree with the key."""
    return b"r%d" % rank


def _can(socket: zmq.Socket[bytes], event: int) -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return events & event != 0
