"""Dials the ranks that take volunteers' help, and measures how far they are: 64 KiB there and back.

The edges of the volunteer pipelines' allocation (ICLR 2025 submission, section 3.3): both delays, and what travels over
both bandwidths."""

from __future__ import annotations

import time
from typing import Final

import torch
import zmq
from zmq.utils import z85

from atoll.ports import host_and_port
from atoll.strategies.volunteer.messages import Server, from_list, read, written
from atoll.strategies.volunteer.port import HEARTBEAT_MS, SILENT_MS
from atoll.v1.agents_pb2 import Helping
from atoll.v1.common_pb2 import LinkSample

PROBE_BYTES: Final = 64 << 10
TURNS: Final = 2
"""So often it is sent to each; the faster counts."""
ANSWER_S: Final = 1.0
MEASURE_S: Final = 3.0
"""For all together: who is not measured by then is taken to be as near as the nearest."""


def prepare(line: zmq.Socket[bytes], public_key: bytes) -> None:
    """A DEALER for a rank's port, not connected yet. public_key: of the rank; the volunteer's is a new one."""
    public, secret = zmq.curve_keypair()
    line.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(public_key))
    line.setsockopt(zmq.CURVE_PUBLICKEY, public)
    line.setsockopt(zmq.CURVE_SECRETKEY, secret)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
    ):
        line.setsockopt(option, value)


def measured(context: zmq.Context[zmq.Socket[bytes]], helping: Helping) -> list[LinkSample]:
    """Of the links to all ranks that could be helped, as the one that is says: what they carried, and how long it took
    both ways. Who does not answer is left out; nothing where there is no choice."""
    ends_s = time.monotonic() + MEASURE_S
    greeting = {"kind": "probe", "name": helping.name, "ticket": helping.ticket.hex()}
    helped = Server(-1, helping.address, helping.port, helping.public_key.hex())
    with _Lines(context) as lines:
        line = lines.dial(helped)
        line.send_multipart(written({**greeting, "servers": True}, []))
        if not line.poll(int(1000 * MEASURE_S)):
            return []
        servers = from_list(read(line.recv_multipart())[1])
        if len(servers) < 2:
            return []
        dialled = [(one.rank, lines.dial(one)) for one in servers]
        for _, line in dialled:
            line.send_multipart(written(greeting, []))  # all connect at the same time
        found: dict[int, float] = {}
        for rank, line in dialled:
            for turn in range(1 + TURNS):
                begun_s = time.monotonic()
                if turn:
                    line.send_multipart(written(greeting, [torch.zeros(PROBE_BYTES, dtype=torch.uint8)]))
                if not line.poll(max(0, int(1000 * min(ANSWER_S, ends_s - begun_s)))):
                    break
                line.recv_multipart()
                if turn:
                    found[rank] = min(found.get(rank, MEASURE_S), time.monotonic() - begun_s)
    return [
        LinkSample(peer=rank, sent_bytes=PROBE_BYTES, received_bytes=PROBE_BYTES, busy_s=edge_s)
        for rank, edge_s in found.items()
    ]


class _Lines:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._open: list[zmq.Socket[bytes]] = []

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._open:
            line.close()

    def dial(self, server: Server) -> zmq.Socket[bytes]:
        line = self._context.socket(zmq.DEALER)
        self._open.append(line)
        prepare(line, bytes.fromhex(server.public_key))
        line.connect(f"tcp://{host_and_port(server.address, server.port)}")
        return line
