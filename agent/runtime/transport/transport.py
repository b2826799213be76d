"""The transport of a run: what one worker's engine makes goes to the others, and what they send is delivered."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import MAX_ORDER, MAX_PAYLOAD_BYTES, Frame, Kind, encode
from atoll.agent.runtime.transport.keys import Gatekeeper, Keys, secure_server
from atoll.agent.runtime.transport.limits import Limits
from atoll.agent.runtime.transport.loop import Loop, LoopCallbacks, Source, Submissions
from atoll.agent.runtime.transport.meter import LinkCounts, LinksInUse
from atoll.agent.runtime.transport.peer import Peer
from atoll.agent.runtime.transport.sendqueue import EncodedFrame
from atoll.agent.runtime.transport.topology import Member, Topology
from atoll.errors import AtollError, BadInput, DeadlineExceeded, PeerLost
from atoll.host.ports import host_and_port

MAX_BROADCAST_BYTES: Final = 1024 * 1024
_RECEIVED_AHEAD: Final = 256  # messages of each peer that wait for the wire's thread before the peer has to wait
_END_S: Final = 5.0


class Transport:
    """bind, exchange endpoints, connect; then broadcast, links; goodbye, close. close is the owner's duty always.

    Close it before the source that it takes from."""

    DEADLINE_S: Final = 30.0

    def __init__(
        self,
        me: int,
        members: Sequence[Member],
        *,
        run: int,
        keys: Keys | None,
        host: str,
        deadline_s: float = DEADLINE_S,
        limits: Limits | None = None,
    ) -> None:
        """me: this rank. members: by rank. host: the address to listen on, which peers can reach. keys: None sends in
        the clear. deadline_s: for connecting. Raises BadInput."""
        self._topology = Topology.of(me, members)
        self._beyond = frozenset(member.rank for member in members if member.island != self._topology.me.island)
        self._run = run
        self._keys = keys
        self._host = host
        if host in {"", "*", "0.0.0.0", "::"}:
            raise BadInput(f"host {host!r} is no address that peers can connect to. Give one address of this machine")
        unknown = [rank for rank in self._topology.peers if keys is not None and rank not in keys.of]
        if keys is not None and unknown:
            raise BadInput(f"there is no public key of rank {unknown[0]}; ranks {sorted(keys.of)[:16]} have one")
        self._deadline_s = deadline_s
        self._limits = limits or Limits()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._peers: dict[int, Peer] = {}
        self._submissions = Submissions()
        self._thread: threading.Thread | None = None
        self._loop: Loop | None = None
        self._met = threading.Event()
        self._failure: AtollError | None = None
        self._closed = False

    @property
    def peers(self) -> Sequence[int]:
        """Return the ranks that it connects with."""
        return self._topology.peers

    def bind(self) -> Endpoint:
        """Listen. Raises BadInput where the host is no address of this machine."""
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.RCVHWM, _RECEIVED_AHEAD),
            (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
            (zmq.LINGER, 0),
            (zmq.IPV6, int(":" in self._host)),
        ):
            router.setsockopt(option, value)
        if self._keys is not None:
            self._gatekeeper = Gatekeeper(self._context, {key: str(rank) for rank, key in self._keys.of.items()}.get)
            secure_server(router, self._keys)
        self._router = router
        name = f"ipc://@atoll-{self._run}-{self._topology.me.rank}-{secrets.token_hex(16)}"
        try:
            router.bind(f"tcp://{host_and_port(self._host, 0)}")
            tcp = router.getsockopt(zmq.LAST_ENDPOINT)
            router.bind(name)
        except zmq.ZMQError as error:
            raise BadInput(f"cannot listen on {self._host}: {error}. Is it an address of this machine?") from error
        assert isinstance(tcp, bytes)
        return Endpoint(tcp.rstrip(b"\0").decode(), name)

    def connect(
        self,
        endpoints: Sequence[Endpoint],
        source: Source | None,
        deliver: Callable[[Frame], str | None],
        lost: Callable[[str], None],
        waits: Callable[[bool], None] = lambda waits: None,
        *,
        continues_without: Callable[[int, AtollError], bool] = lambda rank, error: False,
    ) -> None:
        """Start the thread, and wait until every peer is connected and has said hello.

        endpoints: by rank. source: None where all that leaves is given to `broadcast` and `send`. deliver, lost, waits:
        called on the wire's thread, deliver already before this returns. waits: told when something begins to wait for
        links, and when nothing does any more. continues_without: whether the others
        continue without this lost peer; nothing is delivered from it afterwards.
        Raises NotAllowed where keys do not fit, PeerLost, DeadlineExceeded; after each
        only close is left."""
        if self._router is None or self._thread is not None or self._closed:
            raise BadInput("connect comes once, after bind and before close")
        if len(endpoints) != len(self._topology.members):
            raise BadInput(f"{len(endpoints)} endpoints for {len(self._topology.members)} members: one each is needed")
        for rank in self._topology.peers:
            self._peers[rank] = self._peer(rank, endpoints[rank])

        def on_lost(error: AtollError) -> None:
            self._failure = error
            if self._met.is_set():
                lost(str(error))
            self._met.set()

        callbacks = LoopCallbacks(deliver, self._met.set, on_lost, waits, continues_without)
        self._loop = Loop(
            topology=self._topology,
            run=self._run,
            router=self._router,
            gatekeeper=self._gatekeeper,
            peers=self._peers,
            source=source,
            submissions=self._submissions,
            callbacks=callbacks,
            limits=self._limits,
        )
        # A daemon: a script that ends without closing its run must not hang here.
        self._thread = threading.Thread(target=self._loop.run, name="atoll-wire", daemon=True)
        self._thread.start()
        self._await_peers()

    def _await_peers(self) -> None:
        """Raises DeadlineExceeded naming those that are missing, and what ended the thread meanwhile."""
        if not self._peers:
            return
        if not self._met.wait(self._deadline_s):
            missing = [f"{p.member} ({p.trouble})" for p in self._peers.values() if not p.ready]
            raise DeadlineExceeded(
                f"no connection within {self._deadline_s:g} s to {', '.join(missing[:8])}. Are they alive, and can "
                "this machine reach their addresses?"
            )
        if self._failure is not None:
            raise self._failure

    def broadcast(self, kind: Kind, step: int, payload: bytes, count: int = 0) -> None:
        """Send to all ranks, from any thread, without waiting. Raises PeerLost after a loss, BadInput if too large."""
        if kind not in {Kind.CONTROL, Kind.DIGEST, Kind.GOODBYE} or len(payload) > MAX_BROADCAST_BYTES:
            raise BadInput(
                f"{kind.name} of {len(payload)} bytes cannot be broadcast: CONTROL, DIGEST and GOODBYE of at most "
                f"{MAX_BROADCAST_BYTES} bytes can"
            )
        frame = Frame(kind, self._run, step, 0, MAX_ORDER, self._topology.me.rank, count, payload)
        self._submit(self._topology.routes(kind), frame)

    def send(self, to: int, step: int, tensor: int, count: int, payload: bytes | memoryview) -> None:
        """Send to one peer, from any thread, without waiting: the caller bounds what is in flight. The payload must
        not change until it is sent. Raises PeerLost after a loss, BadInput if too large or if `to` is no peer."""
        if to not in self._peers:
            raise BadInput(f"rank {to} is no direct peer of rank {self._topology.me.rank}: {sorted(self._peers)} are")
        frame = Frame(Kind.DIRECT, self._run, step, tensor, tensor, self._topology.me.rank, count, payload)
        self._submit((to,), frame)

    def _submit(self, ranks: Sequence[int], frame: Frame) -> None:
        if self._failure is not None:
            raise PeerLost(str(self._failure))
        if self._thread is None or self._closed:
            raise BadInput("broadcast and send come after connect and before close")
        encoded = EncodedFrame(frame.kind, frame.step, frame.order, encode(frame), frame.payload)
        self._submissions.put(ranks, encoded)

    def goodbye(self) -> None:
        """Tell all ranks, behind everything that waits to leave, that this rank leaves on purpose: its disconnect is
        no loss. After a loss there is nobody to tell."""
        if self._failure is None:
            self.broadcast(Kind.GOODBYE, 0, b"")

    def close(self, linger_s: float = 2.0) -> None:
        """Give what waits to leave `linger_s` to do so, and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._submissions.end(time.monotonic() + linger_s)
            self._thread.join(timeout=linger_s + _END_S)
            if self._thread.is_alive():
                return  # deliver hangs: its sockets cannot be closed under it
        for peer in self._peers.values():
            peer.close_sockets()
        self._context.destroy(linger=int(1000 * linger_s) if self._failure is None else 0)
        for peer in self._peers.values():
            peer.close()
            if linger_s > 0 and self._failure is None and not peer.is_given_up:
                peer.meter.end()
        self._submissions.close()

    def links(self) -> list[LinkCounts]:
        """Each direct peer's counts so far, from any thread."""
        return [peer.meter.link(rank) for rank, peer in self._peers.items()]

    def in_use(self) -> LinksInUse:
        """Return the state of connections to other islands. From any thread."""
        leaders = [(rank, self._peers[rank]) for rank in self._topology.leaders if rank in self._peers]
        used = {rank: use for rank, peer in leaders if (use := peer.in_use()) is not None}
        waits, left_bytes = any(one[0] for one in used.values()), sum(one[2] for one in used.values())
        return LinksInUse(waits, {rank: one[1] for rank, one in used.items()}, left_bytes, self._beyond)

    @property
    def refused(self) -> int:
        """Connections that were not admitted, and messages of such that are none of this rank's peers."""
        refused = self._gatekeeper.refused if self._gatekeeper is not None else 0
        return refused + (self._loop.inbox.strangers if self._loop is not None else 0)

    def _peer(self, rank: int, endpoint: Endpoint) -> Peer:
        member = self._topology.members[rank]
        local = member.node == self._topology.me.node and endpoint.within_reach()
        address = endpoint.local if local else endpoint.tcp
        return Peer(
            self._context,
            me=self._topology.me.rank,
            member=member,
            address=address,
            keys=self._keys,
            limits=self._limits,
            deadline_s=self._deadline_s,
        )
