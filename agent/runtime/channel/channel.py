"""The channel of a run: brings frames of a rank's exchange engine to the others, and theirs to it; proposals and
digests beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from atoll.agent.runtime.channel import membership
from atoll.agent.runtime.channel.proposals import BroadcastProposals
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport import topology
from atoll.agent.runtime.transport.digests import Digests
from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import Frame, Kind
from atoll.agent.runtime.transport.limits import Limits
from atoll.agent.runtime.transport.loop import Source
from atoll.agent.runtime.transport.meter import LinksInUse
from atoll.agent.runtime.transport.transport import Transport
from atoll.errors import AtollError
from atoll.v1.common_pb2 import LinkSample

LINGER_S: Final = 30.0  # the last step's data may still be on a thin link; peers wait for it


class FrameReceiver(Protocol):
    """Takes what comes, on the wire's thread."""

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        """Returns why it was refused, None if it was taken."""

    def fail(self, reason: str) -> None:
        """A peer is gone: whoever waits for it raises PeerLost."""


class FrameEngine(Source, FrameReceiver, Protocol):
    """Makes what leaves, too (atoll.kernels.exchange_engine)."""


class Channel:
    """Owns the transport of one run; in a run of one worker there is none, and nothing is sent.

    `islands` or `all_connected`, and then `connect`, come once, before anything else. Methods run on the training
    thread."""

    def __init__(self, session: Session, busy: Callable[[bool], None]) -> None:
        """busy: told when something begins to wait for links, and when nothing does any more; on any thread."""
        self._session, self._busy = session, busy
        place = session.place
        self.proposals = BroadcastProposals(place.rank, place.world_size, partial(self._broadcast, Kind.CONTROL))
        self._engine: FrameReceiver
        self._digests: Digests
        self._lock = threading.Lock()
        self._up_to: int | None = None if session.probe is None else 0  # sync rounds that are delivered; None: all
        self._withheld: list[Frame] = []  # of later sync rounds
        self._transport: Transport | None = None

    def islands(self) -> list[list[int]]:
        """The ranks of each island, ascending. Collective; raises PeerLost."""
        self._members = membership.members(self._session)
        return membership.islands(self._members)

    def all_connected(self) -> None:
        """Connect every rank directly to all others, across islands; call it in place of `islands`. Collective;
        raises PeerLost."""
        nodes = [member.node for member in membership.members(self._session)]
        self._members = topology.members_of(nodes, [""] * len(nodes))

    def connect(self, engine: FrameEngine, tensors: Sequence[str]) -> None:
        """Collective: all ranks meet here, and frames flow from now on: each may take as long as a collective to leave.
        tensors: names, by the engine's numbers.

        Raises PeerLost, DeadlineExceeded."""
        self._connect(engine, engine, tensors)

    def connect_receiver(
        self,
        receiver: FrameReceiver,
        tensors: Sequence[str],
        continues_without: Callable[[int, str], bool] = lambda rank, reason: False,
    ) -> None:
        """Connect a receiver of frames whose payloads go through `send`. continues_without: called on the
        transport's thread with a lost rank; returns whether this rank continues without it."""
        self._connect(receiver, None, tensors, continues_without)

    def send(self, to: int, number: int, tensor: int, count: int, payload: bytes | memoryview) -> None:
        """Send to one peer, of the same island or between leaders of islands, as Transport.send."""
        assert self._transport is not None  # connect came before, in a run of several
        self._transport.send(to, number, tensor, count, payload)

    def _connect(
        self,
        engine: FrameReceiver,
        source: Source | None,
        tensors: Sequence[str],
        continues_without: Callable[[int, str], bool] = lambda rank, reason: False,
    ) -> None:
        session = self._session
        self._engine = engine
        self._digests = Digests(session.place.rank, tensors, partial(self._broadcast, Kind.DIGEST))
        if session.group is None:
            return
        self._transport = Transport(
            session.place.rank,
            self._members,
            run=session.incarnation,
            keys=membership.data_keys(session),
            host=membership.host(session),
            limits=Limits(leave_s=session.collective_timeout_s),
        )
        try:
            own = self._transport.bind()
            gathered = session.group.gather_bytes(str(own).encode())
            endpoints = [Endpoint.parse(one.decode(errors="replace")) for one in gathered]
            if session.links is not None:
                peers = self._transport.peers
                endpoints = [
                    replace(one, tcp=session.links.endpoint(rank, one.tcp)) if rank in peers else one
                    for rank, one in enumerate(endpoints)
                ]
            self._transport.connect(
                endpoints,
                source,
                self._hear,
                self._lost,
                self._busy,
                continues_without=lambda rank, why: continues_without(rank, str(why)),
            )
        except BaseException:
            self._transport.close(linger_s=0)
            raise

    def compare(self, digests: Iterable[tuple[int, int, int]]) -> None:
        """(sync round, tensor, digest of this rank's shared parameter) go to all ranks; those that came are compared.

        Raises WeightsDiffer."""
        self._digests.take(digests)
        self._digests.check()

    def deliver_up_to(self, number: int) -> None:
        """Deliver frames up to this sync round; later ones wait for another call. In a trial all ranks share a
        machine and every frame would come at once: this makes weights as stale as over a thin link."""
        if self._up_to is None:
            return
        with self._lock:
            self._up_to = number
            due = [frame for frame in self._withheld if frame.step <= number]
            self._withheld = [frame for frame in self._withheld if frame.step > number]
            for frame in due:
                if (flaw := self._deliver(frame)) is not None:
                    raise AtollError(f"a part of sync round {frame.step} that was withheld is refused: {flaw}")

    def link_samples(self) -> list[LinkSample]:
        """Return the traffic of each connection since the run began."""
        return [
            LinkSample(
                peer=link.rank,
                sent_bytes=link.bytes_left,
                received_bytes=link.bytes_received,
                busy_s=link.busy_s,
                goodput_bps=link.goodput_bps,
                dropped={str(reason): count for reason, count in link.dropped.items()},
            )
            for link in (self._transport.links() if self._transport is not None else ())
        ]

    def in_use(self) -> LinksInUse | None:
        """Return the state of connections to other islands; None without a transport. From any thread."""
        return self._transport.in_use() if self._transport is not None else None

    def sent_bytes(self) -> int:
        """Return the bytes sent on all links since the run began."""
        return sum(link.bytes_sent for link in self._transport.links()) if self._transport is not None else 0

    def abort(self, reason: str) -> None:
        """Nothing of the others counts any more: whoever waits for it raises PeerLost. By any thread."""
        if self._transport is not None:
            self._lost(reason)

    def leave(self) -> None:
        """This rank is done with the run: its going is no loss."""
        if self._transport is not None:
            self._transport.goodbye()

    def close(self, *, linger_s: float = LINGER_S) -> None:
        """linger_s: how long what waits to leave may do so."""
        if self._transport is not None:
            self._transport.close(linger_s=linger_s)

    def _broadcast(self, kind: Kind, number: int, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.broadcast(kind, number, payload)

    def _hear(self, frame: Frame) -> str | None:
        match frame.kind:
            case Kind.PART | Kind.SUM | Kind.TO_AGGREGATOR | Kind.FROM_AGGREGATOR:
                return self._hear_part(frame)
            case Kind.DIRECT:
                return self._deliver(frame)
            case Kind.CONTROL:
                return self._hear_proposal(frame)
            case Kind.DIGEST:
                return self._digests.hear(frame.step, frame.origin, frame.payload)
            case _:
                return "unknown kind"

    def _hear_proposal(self, frame: Frame) -> str | None:
        flaw = self.proposals.hear(frame.step, frame.origin, frame.payload)
        if (differs := self.proposals.differs) is not None:
            self._engine.fail(differs)  # what a forward pass waits for may never come
        return flaw

    def _hear_part(self, frame: Frame) -> str | None:
        with self._lock:
            if self._up_to is None or frame.step <= self._up_to:
                return self._deliver(frame)
            self._withheld.append(replace(frame, payload=bytes(frame.payload)))  # its memory is the transport's
            return None

    def _deliver(self, frame: Frame) -> str | None:
        return self._engine.deliver(int(frame.kind), frame.origin, frame.step, frame.tensor, frame.count, frame.payload)

    def _lost(self, reason: str) -> None:
        self.proposals.fail(reason)
        self._engine.fail(reason)
