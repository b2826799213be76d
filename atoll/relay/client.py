"""Calls a relay: as who stands by, who dials, or who answers. On an event loop, with bare sockets."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from atoll.errors import ControllerUnreachable, NotAllowed
from atoll.network.rpc import split_address
from atoll.relay.handshake import NONCE_BYTES, Call, exactly, proven, read_frame, write_frame
from atoll.relay.server import keep_alive

CONNECT_S: Final = 5.0
KEEPALIVE_S: Final = 10
_REFUSED_HERE: Final = "a key that is not of this relay"


async def connected(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(connection, where)
        keep_alive(connection, KEEPALIVE_S)
    except BaseException:
        connection.close()
        raise
    return connection


async def call_relay(address: str, call: Call, key: bytes, answer_s: float) -> socket.socket:
    """A connection that the relay has admitted, joined where it is a dial or an answer.

    Raises OSError and TimeoutError where it cannot be reached, NotAllowed where it refuses the key,
    ControllerUnreachable where it refuses for now."""
    host, port = split_address(address)
    connection = await connected(host, port)
    try:
        async with asyncio.timeout(answer_s):
            nonce = await exactly(connection, NONCE_BYTES)
            await write_frame(connection, proven(call, key, nonce))
            said = await read_frame(connection)
        if (why := said.get("refused")) is not None:
            kind = NotAllowed if why == _REFUSED_HERE else ControllerUnreachable
            raise kind(f"the relay at {address} refused to {call.want} for {call.node}: {why}")
    except BaseException:
        connection.close()
        raise
    return connection
