"""Passes bytes between a worker's connection in the clear and a link that strangers carry, sealed.

What torch's collectives send is not encrypted. Each end says a fresh public key, and both derive the keys of this link
from it and from those of the two ranks (`sealing.py`); then records follow, each its length and what was sealed. The
first of each end is empty: who has not the keys of the run is found out before a byte of a worker passes. An empty one
later is the end, so a link that was cut is not taken for one that was closed."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from atoll.agent.runtime.checkpoints.memory.replication.sealing import Seal, Sealer
from atoll.agent.runtime.transport.keys import KEY_BYTES
from atoll.errors import NotAllowed
from atoll.relay.handshake import exactly

PURPOSE: Final = b"atoll passages 1"
RECORD_BYTES: Final = 128 * 1024
_LENGTH: Final = struct.Struct("!I")
_TAG_BYTES: Final = 16
_MEET_S: Final = 30.0


async def join_sealed(plain: socket.socket, link: socket.socket, sealer: Sealer, rank: int) -> None:
    """Forward data until both ends have closed or either fails; then close both. rank: of the worker at the other
    end.

    Raises NotAllowed if the other end lacks its keys, OSError if a connection fails."""
    loop = asyncio.get_running_loop()
    for one in (plain, link):
        one.setblocking(False)
    try:
        async with asyncio.timeout(_MEET_S):
            await loop.sock_sendall(link, sealer.ephemeral)
            towards, back = sealer.meet(rank, await exactly(link, KEY_BYTES))
            await _write(link, towards, b"")
            if await _read(link, back):
                raise NotAllowed(f"rank {rank} began a link with something else than its greeting")
        async with asyncio.TaskGroup() as group:
            group.create_task(_seal(plain, link, towards))
            group.create_task(_open(link, plain, back))
    finally:
        link.close()
        plain.close()


async def _seal(plain: socket.socket, link: socket.socket, seal: Seal) -> None:
    loop, room = asyncio.get_running_loop(), memoryview(bytearray(RECORD_BYTES))
    while count := await loop.sock_recv_into(plain, room):
        await _write(link, seal, room[:count])
    await _write(link, seal, b"")


async def _open(link: socket.socket, plain: socket.socket, seal: Seal) -> None:
    loop = asyncio.get_running_loop()
    while data := await _read(link, seal):
        await loop.sock_sendall(plain, data)
    plain.shutdown(socket.SHUT_WR)


async def _write(link: socket.socket, seal: Seal, data: bytes | memoryview) -> None:
    head = _LENGTH.pack(len(data) + _TAG_BYTES)
    await asyncio.get_running_loop().sock_sendall(link, head + seal.seal(seal.next_number(), head, data))


async def _read(link: socket.socket, seal: Seal) -> bytes:
    head = await exactly(link, _LENGTH.size)
    (length,) = _LENGTH.unpack(head)
    if not _TAG_BYTES <= length <= RECORD_BYTES + _TAG_BYTES:
        raise NotAllowed(f"a record of {length} bytes came on a sealed link")
    data = seal.open(seal.newest_number + 1, head, await exactly(link, length))
    if data is None:
        raise NotAllowed("a record on a sealed link is not of the worker that it should be of, or was changed")
    return data
