"""The wire's thread: waits for sockets, the engine and its own process, and moves frames between them."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import zmq

from atoll.agent.runtime.transport.frames import Frame, Kind, encode
from atoll.agent.runtime.transport.inbox import Inbox
from atoll.agent.runtime.transport.keys import Gatekeeper
from atoll.agent.runtime.transport.limits import Limits
from atoll.agent.runtime.transport.peer import Peer
from atoll.agent.runtime.transport.sendqueue import EncodedFrame
from atoll.agent.runtime.transport.shared import ArenaView
from atoll.agent.runtime.transport.topology import Topology
from atoll.errors import AtollError, PeerLost

_TICK_S: Final = 0.1
_FLUSH_S: Final = 0.005  # how often closing looks whether everything has left
_AT_ONCE: Final = 64  # messages or payloads of one source before the others have their turn
_EMPTY_TAKES: Final = 16  # in a row from a source that says it has something: it failed, and says so elsewhere


class OutgoingPayload(Protocol):
    """A payload that the engine wants to have sent (atoll.kernels.exchange_engine.Outgoing). kind: that of a frame. to:
    the rank that it is for, -1 for where frames of its kind go."""

    @property
    def kind(self) -> int: ...
    @property
    def sync_round(self) -> int: ...
    @property
    def tensor(self) -> int: ...
    @property
    def order(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def payload(self) -> bytes | memoryview: ...
    @property
    def to(self) -> int: ...


class Source(Protocol):
    """Source of payloads (atoll.kernels.exchange_engine.ExchangeEngine)."""

    def fileno(self) -> int:
        """A descriptor that is readable while `take_outgoing` has something."""

    def take_outgoing(self, limit: int) -> Sequence[OutgoingPayload]: ...


@dataclass(frozen=True, slots=True)
class LoopCallbacks:
    """Called on the wire's thread."""

    deliver: Callable[[Frame], str | None]  # a returned reason is counted as dropped
    ready: Callable[[], None]  # every peer is connected and has said hello
    lost: Callable[[AtollError], None]  # once; from then on nothing is received
    waits: Callable[[bool], None] = lambda waits: None  # whether something waits to leave now; told when it changes
    continues_without: Callable[[int, AtollError], bool] = lambda rank, error: False  # without this peer, which is lost


@dataclass(slots=True)
class Submissions:
    """Messages to send and the request to end, from other threads. Filled under the GIL alone: deque.append is
    atomic."""

    wake: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    frames: deque[tuple[Sequence[int], EncodedFrame]] = field(default_factory=deque)  # with the ranks they go to
    ends_s: float | None = None  # monotonic: flush until then, and end

    def put(self, ranks: Sequence[int], encoded: EncodedFrame) -> None:
        self.frames.append((ranks, encoded))
        os.eventfd_write(self.wake, 1)

    def end(self, ends_s: float) -> None:
        self.ends_s = ends_s
        os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        os.close(self.wake)


class Loop:
    """Everything here runs on the wire's thread. `run` returns when its end was asked for.

    It is woken up a dozen times a step, between others' work and so with cold caches: what it does each time, whatever
    there is to do, costs more than the frames. So it waits for descriptors by epoll. ZeroMQ's say that something may
    have changed, and only until it is asked: who is woken up takes all that a socket has."""

    def __init__(
        self,
        *,
        topology: Topology,
        run: int,
        router: zmq.Socket[bytes],
        gatekeeper: Gatekeeper | None,
        peers: Mapping[int, Peer],
        source: Source | None,
        submissions: Submissions,
        callbacks: LoopCallbacks,
        limits: Limits,
    ) -> None:
        self.inbox = Inbox(topology, run, peers, gatekeeper is not None)
        self._topology = topology
        self._run = run
        self._router = router
        self._gatekeeper = gatekeeper
        self._peers = peers
        self._source = source
        self._source_fd = source.fileno() if source is not None else None
        self._watching = source is not None
        self._empty_takes = 0
        self._submissions = submissions
        self._callbacks = callbacks
        self._limits = limits
        self._ready = self._lost = False
        self._next_tick_s = 0.0
        self._queued: set[int] = set()  # peers for whom something waits
        self._writing: set[int] = set()  # of these, whose socket is watched for room
        self._router_fd = router.fileno()
        self._gatekeeper_fd = gatekeeper.socket.fileno() if gatekeeper is not None else None
        self._by_monitor = {peer.monitor.fileno(): rank for rank, peer in peers.items()}
        self._more = True  # the router may have messages that its descriptor does not tell of
        self._epoll = select.epoll()
        zeromq = {self._router_fd, self._gatekeeper_fd, *self._by_monitor}
        for descriptor in (submissions.wake, self._source_fd, *zeromq):
            if descriptor is not None:
                self._epoll.register(descriptor, select.EPOLLIN)
        self._ready_first = {one for one in zeromq if one is not None}  # their descriptors may have told already

    def run(self) -> None:
        """Run until the submissions end it. An error of this thread is a loss too, and reaches its owner."""
        try:
            while not self._over(time.monotonic()):
                try:
                    self._turn()
                except AtollError as error:
                    self._lose(error)
        except BaseException as error:
            self._lose(AtollError(f"the wire's thread failed: {error!r}. This is a bug"))
            raise
        finally:
            self._epoll.close()

    def _over(self, now_s: float) -> bool:
        ends_s = self._submissions.ends_s
        if ends_s is None:
            return False
        if self._lost or now_s >= ends_s:
            return True
        return not self._submissions.frames and all(peer.empty for peer in self._peers.values())

    def _pause_s(self, now_s: float) -> float:
        if self._lost:
            return 1.0
        if self._more:
            return 0.0
        if self._submissions.ends_s is not None:
            return _FLUSH_S
        return max(self._next_tick_s - now_s, 0) + 0.001

    def _turn(self) -> None:
        ready = {descriptor for descriptor, _ in self._epoll.poll(self._pause_s(time.monotonic()))}
        ready |= self._ready_first
        self._ready_first = set()
        now_s = time.monotonic()
        if self._submissions.wake in ready:
            os.eventfd_read(self._submissions.wake)
        if self._lost:
            return
        while self._submissions.frames:
            ranks, encoded = self._submissions.frames.popleft()
            self._send(ranks, encoded, now_s)
        if self._gatekeeper is not None and self._gatekeeper_fd in ready:
            self._gatekeeper.answer()
        if self._more or self._router_fd in ready:
            self._receive(now_s)
        for monitor in ready & self._by_monitor.keys():
            rank = self._by_monitor[monitor]
            if self._peers[rank].observe(now_s):
                self._greet(rank, now_s)
        if self._source is not None and self._source_fd in ready:
            self._take(self._source, now_s)
        if self._queued:
            self._flush()
        if self._source is not None:
            self._watch_source()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _TICK_S
            for rank, peer in self._peers.items():
                self._tick(rank, peer, now_s)

    def _tick(self, rank: int, peer: Peer, now_s: float) -> None:
        try:
            peer.tick(now_s)
        except PeerLost as error:
            if not (self._ready and self._callbacks.continues_without(rank, error)):
                raise
            peer.give_up()

    def _receive(self, now_s: float) -> None:
        self._more = True
        for _ in range(_AT_ONCE):
            try:
                message = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._more = False
                return
            for peer, frame, encoded in self.inbox.open(message):
                self._on_frame(peer, frame, encoded, now_s)

    def _on_frame(self, peer: Peer, frame: Frame, encoded: EncodedFrame, now_s: float) -> None:
        if peer.gone:
            return  # it was given up: nothing of it counts any more
        if frame.kind is Kind.HELLO:
            self._on_hello(peer, bytes(frame.payload))
            return
        if frame.kind is Kind.GOODBYE and frame.origin == peer.member.rank:
            peer.left = True
        self._send(self._topology.relays(frame.kind, peer.member.rank), encoded, now_s)
        if self._submissions.ends_s is None and frame.kind is not Kind.GOODBYE:
            refused = self._callbacks.deliver(frame)
            if refused is not None:
                peer.meter.drop(refused)

    def _on_hello(self, peer: Peer, offer: bytes) -> None:
        if offer and peer.view is None and peer.member.node == self._topology.me.node:
            peer.view = ArenaView.open(offer)
        peer.greeted = True
        if not self._ready and all(each.ready for each in self._peers.values()):
            self._ready = True
            self._callbacks.ready()

    def _greet(self, rank: int, now_s: float) -> None:
        peer = self._peers[rank]
        offer = peer.arena.offer if peer.arena is not None else b""
        hello = Frame(Kind.HELLO, self._run, 0, 0, 0, self._topology.me.rank, 0, offer)
        self._send((rank,), EncodedFrame(Kind.HELLO, 0, 0, encode(hello), offer), now_s)
        if not self._ready and all(each.ready for each in self._peers.values()):
            self._ready = True
            self._callbacks.ready()

    def _take(self, source: Source, now_s: float) -> None:
        me = self._topology.me
        for at in range(_AT_ONCE):
            taken = source.take_outgoing(1)  # one by one: how large it is, is not known before
            if not taken:
                self._empty_takes += at == 0
                return
            self._empty_takes = 0
            (out,) = taken
            kind = Kind(out.kind)
            origin = me.rank if kind is Kind.PART else me.island
            header = encode(
                Frame(kind, self._run, out.sync_round, out.tensor, out.order, origin, out.count, out.payload)
            )
            receivers = self._topology.routes(kind) if out.to < 0 else (out.to,)
            self._send(receivers, EncodedFrame(kind, out.sync_round, out.order, header, out.payload), now_s)
            if self._full:
                return

    @property
    def _full(self) -> bool:
        return any(self._peers[rank].queue.bytes > self._limits.send_buffer_bytes for rank in self._queued)

    def _send(self, ranks: Sequence[int], encoded: EncodedFrame, now_s: float) -> None:
        for rank in ranks:
            self._peers[rank].push(encoded, now_s)
        self._queued.update(ranks)

    def _flush(self) -> None:
        waited = bool(self._writing)
        for rank in tuple(self._queued):
            peer = self._peers[rank]
            waits = peer.flush()
            if waits and rank not in self._writing:
                self._epoll.register(peer.dealer.fileno(), select.EPOLLIN)  # its room is news like any other
                self._writing.add(rank)
            elif not waits and rank in self._writing:
                self._epoll.unregister(peer.dealer.fileno())
                self._writing.discard(rank)
            if not waits:
                self._queued.discard(rank)
        if bool(self._writing) != waited:
            self._callbacks.waits(not waited)

    def _watch_source(self) -> None:
        """Not while a peer's queue is full: what waits in the engine is bounded there and still sorted."""
        watch = not self._full and self._empty_takes < _EMPTY_TAKES
        if watch != self._watching:
            assert self._source_fd is not None
            self._epoll.modify(self._source_fd, select.EPOLLIN if watch else 0)
            self._watching = watch

    def _lose(self, error: AtollError) -> None:
        if self._lost:
            return
        self._lost = True
        self._epoll.close()
        self._epoll = select.epoll()
        self._epoll.register(self._submissions.wake, select.EPOLLIN)
        if self._submissions.ends_s is None:
            self._callbacks.lost(error)
