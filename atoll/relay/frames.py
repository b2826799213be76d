"""Reads and writes frames on a bare socket, and not one byte too many: what follows belongs to the link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from atoll.errors import BadInput
from atoll.relay.handshake import LENGTH, MAX_FRAME_BYTES, body_of, framed


async def exactly(connection: socket.socket, count: int) -> bytes:
    """Raises ConnectionError where the other end closes before."""
    loop = asyncio.get_running_loop()
    read = bytearray(count)
    left = memoryview(read)
    while left:
        more = await loop.sock_recv_into(connection, left)
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        left = left[more:]
    return bytes(read)


async def read_frame(connection: socket.socket) -> dict[str, Any]:
    """Raises ConnectionError, BadInput."""
    (length,) = LENGTH.unpack(await exactly(connection, LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise BadInput(f"a frame of {length} bytes is announced; at most {MAX_FRAME_BYTES} are taken")
    return body_of(await exactly(connection, length))


async def write_frame(connection: socket.socket, body: Mapping[str, Any]) -> None:
    """Raises OSError, BadInput."""
    await asyncio.get_running_loop().sock_sendall(connection, framed(body))
