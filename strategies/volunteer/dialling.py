"""Dials the ranks that take volunteers' help, and measures how far they are: 64 KiB there and back.

The edges of the volunteer pipelines' allocation (ICLR 2025 submission, section 3.3): both delays, and what travels over
both bandwidths."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import torch
import zmq
from zmq.utils import z85

from atoll.errors import BadInput
from atoll.host.ports import host_and_port
from atoll.strategies.volunteer.messages import Server, from_list, read, written
from atoll.strategies.volunteer.port import HEARTBEAT_MS, SILENT_MS
from atoll.v1.agents_pb2 import Helping
from atoll.v1.common_pb2 import LinkSample

PROBE_BYTES: Final = 64 << 10
PROBES_PER_RANK: Final = 2
"""Probes sent to each rank; the faster counts."""
ANSWER_S: Final = 1.0
MEASURE_S: Final = 3.0
"""Seconds for all probes together; a rank not measured by then counts as near as the nearest."""
PAUSES_S: Final = (0.0, 5.0, 15.0, *(60.0,) * 10)
"""Pauses before each measurement, in seconds. A single one moves no helper (controller/jobs/model/supply.py)."""
LOOK_S: Final = 0.1
"""Interval of looks for the end, in seconds."""
END_S: Final = 5.0


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


@contextmanager
def measuring(
    context: zmq.Context[zmq.Socket[bytes]], helping: Helping, tell: Callable[[list[LinkSample]], None]
) -> Iterator[None]:
    """Have the links measured by a thread meanwhile, so that no task waits for that."""
    stop = threading.Event()

    def measure() -> None:
        for pause_s in PAUSES_S:
            if stop.wait(pause_s):
                return
            with suppress(BadInput):  # the rank's answer: what it says of tasks is read where these are done
                tell(measured(context, helping, stop))

    thread = threading.Thread(target=measure, name="edges", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=END_S)


def measured(
    context: zmq.Context[zmq.Socket[bytes]], helping: Helping, stop: threading.Event | None = None
) -> list[LinkSample]:
    """Measure the links to all ranks that could be helped: bytes carried, and time both ways. Silent ranks are left
    out; empty without a choice. stop: ends it."""
    ends_s = time.monotonic() + MEASURE_S
    greeting = {"kind": "probe", "name": helping.name, "ticket": helping.ticket.hex()}
    helped = Server(-1, helping.address, helping.port, helping.public_key.hex())
    with ExitStack() as lines:
        line = _dialled(context, lines, helped)
        line.send_multipart(written({**greeting, "servers": True}, []))
        if not _heard(line, ends_s, stop):
            return []
        servers = from_list(read(line.recv_multipart())[1])
        if len(servers) < 2:
            return []
        dialled = [(one.rank, _dialled(context, lines, one)) for one in servers]
        for _, line in dialled:
            line.send_multipart(written(greeting, []))  # all connect at the same time
        found: dict[int, float] = {}
        for rank, line in dialled:
            for turn in range(1 + PROBES_PER_RANK):
                begun_s = time.monotonic()
                if turn:
                    line.send_multipart(written(greeting, [torch.zeros(PROBE_BYTES, dtype=torch.uint8)]))
                if not _heard(line, min(begun_s + ANSWER_S, ends_s), stop):
                    break
                line.recv_multipart()
                if turn:
                    found[rank] = min(found.get(rank, MEASURE_S), time.monotonic() - begun_s)
    return [
        LinkSample(peer=rank, sent_bytes=PROBE_BYTES, received_bytes=PROBE_BYTES, busy_s=edge_s)
        for rank, edge_s in found.items()
    ]


def _heard(line: zmq.Socket[bytes], until_s: float, stop: threading.Event | None) -> bool:
    while (left_s := until_s - time.monotonic()) > 0 and not (stop is not None and stop.is_set()):
        if line.poll(int(1000 * min(left_s, LOOK_S)) + 1):
            return True
    return False


def _dialled(context: zmq.Context[zmq.Socket[bytes]], lines: ExitStack, server: Server) -> zmq.Socket[bytes]:
    line = lines.enter_context(context.socket(zmq.DEALER))
    prepare(line, bytes.fromhex(server.public_key))
    line.connect(f"tcp://{host_and_port(server.address, server.port)}")
    return line
