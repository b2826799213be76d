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
from atoll.strategies.volunteer.messages import written
from atoll.strategies.volunteer.port import HEARTBEAT_MS, SILENT_MS
from atoll.v1.agents_pb2 import Helping

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


def measured(context: zmq.Context[zmq.Socket[bytes]], helping: Helping) -> dict[int, float]:
    """Seconds to each rank and back, by rank; who does not answer is left out. Nothing where there is no choice."""
    ends_s, found = time.monotonic() + MEASURE_S, dict[int, float]()
    greeting = {"kind": "probe", "name": helping.name, "ticket": helping.ticket.hex()}
    lines: dict[int, zmq.Socket[bytes]] = {}
    try:
        for one in helping.servers if len(helping.servers) > 1 else ():
            line = lines[one.rank] = context.socket(zmq.DEALER)
            prepare(line, one.public_key)
            line.connect(f"tcp://{host_and_port(one.address, one.port)}")
            line.send_multipart(written(greeting, []))  # all connect at the same time
        for rank, line in lines.items():
            for turn in range(1 + TURNS):
                begun_s = time.monotonic()
                if turn:
                    line.send_multipart(written(greeting, [torch.zeros(PROBE_BYTES, dtype=torch.uint8)]))
                if not line.poll(max(0, int(1000 * min(ANSWER_S, ends_s - begun_s)))):
                    break
                line.recv_multipart()
                if turn:
                    found[rank] = min(found.get(rank, MEASURE_S), time.monotonic() - begun_s)
    finally:
        for line in lines.values():
            line.close()
    return found
