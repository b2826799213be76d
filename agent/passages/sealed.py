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

PURPOSE: Final = b"atoll passages 1"
RECORD_BYTES: Final = 128 * 1024
_LENGTH: Final = struct.Struct("!I")
_TAG_BYTES: Final = 16
_MEET_S: Final = 30.0


async def join_sealed(plain: socket.socket, link: socket.socket, sealer: Sealer, rank: int) -> None:
    """Until both ends have closed or either fails; closes both. rank: of the worker at the other end.

    Raises NotAllowed where the other end has not its keys, OSError where a connection fails."""
    outer_reader, outer_writer = await asyncio.open_connection(sock=link, limit=2 * RECORD_BYTES)
    inner_reader, inner_writer = await asyncio.open_connection(sock=plain, limit=RECORD_BYTES)
    try:
        async with asyncio.timeout(_MEET_S):
            outer_writer.write(sealer.ephemeral)
            towards, back = sealer.meet(rank, await _exactly(outer_reader, KEY_BYTES))
            await _write(outer_writer, towards, b"")
            if await _read(outer_reader, back):
                raise NotAllowed(f"rank {rank} began a link with something else than its greeting")
        async with asyncio.TaskGroup() as group:
            group.create_task(_seal(inner_reader, outer_writer, towards))
            group.create_task(_open(outer_reader, inner_writer, back))
    finally:
        outer_writer.close()
        inner_writer.close()


async def _seal(plain: asyncio.StreamReader, link: asyncio.StreamWriter, seal: Seal) -> None:
    while data := await plain.read(RECORD_BYTES):
        await _write(link, seal, data)
    await _write(link, seal, b"")


async def _open(link: asyncio.StreamReader, plain: asyncio.StreamWriter, seal: Seal) -> None:
    while data := await _read(link, seal):
        plain.write(data)
        await plain.drain()
    plain.write_eof()


async def _write(link: asyncio.StreamWriter, seal: Seal, data: bytes) -> None:
    head = _LENGTH.pack(len(data) + _TAG_BYTES)
    link.write(head + seal.seal(seal.next_number(), head, data))
    await link.drain()


async def _read(link: asyncio.StreamReader, seal: Seal) -> bytes:
    head = await _exactly(link, _LENGTH.size)
    (length,) = _LENGTH.unpack(head)
    if not _TAG_BYTES <= length <= RECORD_BYTES + _TAG_BYTES:
        raise NotAllowed(f"a record of {length} bytes came on a sealed link")
    data = seal.open(seal.newest_number + 1, head, await _exactly(link, length))
    if data is None:
        raise NotAllowed("a record on a sealed link is not of the worker that it should be of, or was changed")
    return data


async def _exactly(link: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await link.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the link was cut") from error
