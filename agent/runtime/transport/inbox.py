"""Takes apart and checks the messages that come in, and counts those that are dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import zmq

from atoll.agent.runtime.transport.frames import (
    MAGIC,
    SHARED_MAGIC,
    Flaw,
    Frame,
    FrameError,
    decode,
    payload_bytes,
)
from atoll.agent.runtime.transport.peer import Peer, identity
from atoll.agent.runtime.transport.sendqueue import EncodedFrame
from atoll.agent.runtime.transport.shared import PLACE
from atoll.agent.runtime.transport.topology import Topology

_SMALL_BYTES: Final = 4096  # as bytes: copying costs less than keeping ZeroMQ's buffer


class Inbox:
    """Used by the wire's thread alone."""

    def __init__(self, topology: Topology, run: int, peers: Mapping[int, Peer], authenticated: bool) -> None:
        self.strangers = 0
        """Messages of connections that are none of my peers."""
        self._topology = topology
        self._run = run
        self._authenticated = authenticated
        self._peers = {identity(rank): peer for rank, peer in peers.items()}

    def open(self, message: Sequence[zmq.Frame]) -> Iterator[tuple[Peer, Frame, EncodedFrame]]:
        """The valid frames of one multipart message from a ROUTER: (header, payload) any number of times."""
        peer = self._peers.get(message[0].bytes)
        if peer is None or (self._authenticated and not _signed_by(message, peer.member.rank)):
            self.strangers += 1
            return
        parts = message[1:]
        if len(parts) % 2:
            peer.meter.drop(Flaw.DAMAGED)
            parts = parts[:-1]
        for header, payload in zip(parts[::2], parts[1::2], strict=True):
            opened = self._open_one(peer, header.bytes, payload)
            if isinstance(opened, str):
                peer.meter.drop(opened)
            else:
                yield (peer, *opened)

    def _open_one(self, peer: Peer, header: bytes, body: zmq.Frame) -> tuple[Frame, EncodedFrame] | str:
        payload: bytes | memoryview | None = body.bytes if len(body) <= _SMALL_BYTES else body.buffer
        try:
            if header.startswith(SHARED_MAGIC):
                payload = self._from_shared(peer, header, body)
                if payload is None:
                    return Flaw.DAMAGED
                header = MAGIC + header[len(SHARED_MAGIC) :]
            assert payload is not None
            frame = decode(header, payload)
        except FrameError as error:
            return error.reason
        if frame.run != self._run:
            return "old run"
        if not self._topology.accepts(frame.kind, frame.origin, peer.member.rank):
            return "false origin"
        encoded = EncodedFrame(frame.kind, frame.step, frame.order, header, payload)
        peer.meter.frames_received += 1
        peer.meter.bytes_received += encoded.bytes
        return frame, encoded

    def _from_shared(self, peer: Peer, header: bytes, body: zmq.Frame) -> bytes | None:
        if peer.view is None or len(body) != PLACE.size:
            return None
        (position,) = PLACE.unpack(body.bytes)
        return peer.view.take(position, payload_bytes(header))


def _signed_by(message: Sequence[zmq.Frame], rank: int) -> bool:
    return len(message) > 1 and message[1].get("User-Id") == str(rank)
