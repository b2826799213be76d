"""JobService.DialBack: whether this controller reaches the machine of whoever asks."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final
from urllib.parse import unquote

from atoll.errors import BadInput
from atoll.network.rpc import split_address
from atoll.v1 import jobs_pb2

DIAL_S: Final = 3.0
_LOWEST_PORT: Final = 1024
"""Lowest port that is dialled, so that nodes cannot probe a gateway's own services."""


async def dial_back(port: int, peer: str) -> jobs_pb2.DialBackReply:
    """Dials that port at the address of the caller, and nowhere else. Whether it came through is not told: the caller
    sees it, and learns nothing of others' ports. peer: as gRPC names it. Raises BadInput."""
    if not _LOWEST_PORT <= port < 2**16:
        raise BadInput(f"port = {port} must be {_LOWEST_PORT} to 65535: the one on which you listen")
    address = address_of(peer)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            await writer.wait_closed()
    return jobs_pb2.DialBackReply(address=address)


def address_of(peer: str) -> str:
    """'ipv4:10.0.0.1:4242' and 'ipv6:%5Bfd00::2%5D:4242' -> the address. Raises BadInput for what is of no network."""
    kind, _, where = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        raise BadInput(f"a caller at {peer[:80]!r} has no address that could be dialled")
    return split_address(where)[0].removeprefix("::ffff:")
