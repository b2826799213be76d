"""Pings and bursts of bytes over a connection: what both ends of a measured link send and receive.

The receiver measures. It leaves out the first part of a burst, in which TCP speeds up and a token bucket passes what it
had saved."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from contextlib import suppress
from typing import Final

from atoll.errors import BadInput
from atoll.relay.handshake import exactly

PINGS: Final = 8
MAX_BURST_BYTES: Final = 64 * 1024 * 1024
MAX_BURST_S: Final = 3.0
BURST_ROUND_TRIPS: Final = 30
"""Round trips in which TCP reaches a link's speed."""
LONGER_BURST_FACTOR: Final = 10
"""Longest burst over a link with long round trips, as a multiple of a usual one."""
WARM_UP_SHARE: Final = 1 / 3
"""First part of a burst that is not counted."""
LATE_S: Final = 2.0
"""Longest time by which a burst may begin late or take longer: a lost packet is sent again after a second."""
LEAST_RECEIVED: Final = 8
"""Least number of times at which something of a burst arrives, if there is time."""
SETTLE_S: Final = 0.15
"""Pause between two bursts, in which queues on the way become empty."""
_PIECE: Final = os.urandom(256 * 1024)  # noise, which no network compresses
_TCP_NOTSENT_LOWAT: Final = 25  # <netinet/tcp.h>; the socket module lacks it
_NOTSENT_BYTES: Final = 256 * 1024


def burst_seconds(wanted_s: float, rtt_s: float) -> float:
    """Return the length of a burst over a link with this round-trip time."""
    return min(MAX_BURST_S, LONGER_BURST_FACTOR * wanted_s, max(wanted_s, BURST_ROUND_TRIPS * rtt_s))


async def ping(connection: socket.socket, byte: bytes) -> float:
    """Return the least round-trip time of PINGS bytes that the other end returns. Raises OSError."""
    loop, least_s = asyncio.get_running_loop(), float("inf")
    for _ in range(PINGS):
        began_s = time.perf_counter()
        await loop.sock_sendall(connection, byte)
        await exactly(connection, 1)
        least_s = min(least_s, time.perf_counter() - began_s)
    return least_s


async def send_burst(connection: socket.socket, seconds: float) -> None:
    """Send until the seconds or MAX_BURST_BYTES are over, or the other end has enough."""
    loop, sent, end_s = asyncio.get_running_loop(), 0, time.perf_counter() + seconds
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _NOTSENT_BYTES)
    with suppress(ConnectionError, TimeoutError):
        while sent < MAX_BURST_BYTES and (left_s := end_s - time.perf_counter()) > 0:
            async with asyncio.timeout(left_s):
                await loop.sock_sendall(connection, _PIECE)
            sent += len(_PIECE)
            await asyncio.sleep(0)  # a fast link is always ready; heartbeats wait for it


async def receive_burst(connection: socket.socket, seconds: float) -> float:
    """Return the bits a second of a burst of these seconds, from its first byte on. Raises OSError, BadInput if too
    little came."""
    loop, room = asyncio.get_running_loop(), memoryview(bytearray(len(_PIECE)))
    total, seen = 0, list[tuple[float, int]]()  # when, and bytes until then
    with suppress(TimeoutError, ConnectionResetError):
        async with asyncio.timeout(seconds + LATE_S):
            while total < MAX_BURST_BYTES and (count := await loop.sock_recv_into(connection, room)):
                total += count
                seen.append((time.perf_counter(), total))
                if len(seen) >= LEAST_RECEIVED and seen[-1][0] - seen[0][0] >= seconds:
                    break
                await asyncio.sleep(0)
    if len(seen) < 2:
        raise BadInput(f"{total} bytes came in {seconds + LATE_S:g} s")
    (first_s, _), (last_s, _) = seen[0], seen[-1]
    warm_s = first_s + WARM_UP_SHARE * (last_s - first_s)
    began_s, before = next(each for each in seen if each[0] >= warm_s)
    if began_s == last_s:
        began_s, before = seen[-2]
    return 8 * (total - before) / max(last_s - began_s, 1e-6)


async def drain(connection: socket.socket) -> None:
    """Read until the other end has closed: what was sent to it arrives before this end closes."""
    loop, room = asyncio.get_running_loop(), memoryview(bytearray(len(_PIECE)))
    with suppress(ConnectionError):
        while await loop.sock_recv_into(connection, room):
            pass


def close_at_once(connection: socket.socket) -> None:
    """Close without sending what waits to leave: the other end has enough."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
