"""The hub of a network with latency: passes every frame on after a delay.

Stands in for `tc netem`, which not every kernel has. It takes frames as they are from packet sockets on the hub's ends
of the veth pairs, segments still joined (PACKET_VNET_HDR), so that a slow language carries some 450 Mbit/s, and the
token buckets at both ends shape as they do with a bridge. A full link drops, as a router would.
"""

from __future__ import annotations

import heapq
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final

SOL_PACKET: Final = 263
PACKET_VNET_HDR: Final = 15
PACKET_IGNORE_OUTGOING: Final = 23
SO_SNDBUFFORCE: Final = 32
SO_RCVBUFFORCE: Final = 33
ETH_P_ALL: Final = 3
VNET_HEADER: Final = 10  # bytes before the Ethernet header that say how the kernel is to segment and checksum
FRAME_MAX: Final = 1 << 17
BUFFER: Final = 64 << 20  # what arrives while the relay has no processor must not be lost
BATCH: Final = 64


class DelayLine:
    """Frames wait here until their time; equal times keep the order of arrival."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._arrived = 0

    def put(self, now_s: float, port: int, frame: bytes) -> None:
        """A frame from `port`, to be passed on `delay_s` later."""
        self._arrived += 1
        heapq.heappush(self._heap, (now_s + self._delay_s, self._arrived, port, frame))

    def due(self, now_s: float) -> tuple[int, bytes] | None:
        """The next (port it came from, frame) whose time has come, or None."""
        if not self._heap or self._heap[0][0] > now_s:
            return None
        _, _, port, frame = heapq.heappop(self._heap)
        return port, frame

    def wait_s(self, now_s: float) -> float | None:
        """How long nothing is due; None while the line is empty."""
        return max(0.0, self._heap[0][0] - now_s) if self._heap else None


class Switch:
    """Learns which addresses are behind which port, from the frames that come from there."""

    def __init__(self, ports: int) -> None:
        self._everywhere = range(ports)
        self._behind: dict[bytes, int] = {}

    def outputs(self, port: int, frame: bytes) -> Sequence[int]:
        """The ports that an Ethernet frame (after its virtual header) from `port` goes out of."""
        to, source = frame[VNET_HEADER : VNET_HEADER + 6], frame[VNET_HEADER + 6 : VNET_HEADER + 12]
        self._behind[source] = port
        known = self._behind.get(to)
        if known is None or to[0] & 1:  # a group address
            return [other for other in self._everywhere if other != port]
        return [known] if known != port else []


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
    port.bind((name, 0))
    port.setblocking(False)
    return port


def pass_on(ports: Sequence[socket.socket], one_way_s: float) -> None:
    """Pass frames on for ever."""
    line, switch = DelayLine(one_way_s), Switch(len(ports))
    numbers = {port: number for number, port in enumerate(ports)}
    while True:
        ready, _, _ = select.select(ports, [], [], line.wait_s(time.monotonic()))
        for port in ready:
            for _ in range(BATCH):
                try:
                    frame = port.recv(FRAME_MAX)
                except BlockingIOError:
                    break
                line.put(time.monotonic(), numbers[port], frame)
        while (passed := line.due(time.monotonic())) is not None:
            for out in switch.outputs(*passed):
                try:
                    ports[out].send(passed[1])
                except (BlockingIOError, InterruptedError):
                    continue  # no room: dropped
                except OSError as error:
                    print(f"relay: port {out}, {len(passed[1])} bytes: {error}", file=sys.stderr, flush=True)
