"""Checks whether others can dial this machine: the controller tries, as other nodes' workers would."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from atoll.cli.render.findings import Finding
from atoll.errors import AtollError
from atoll.network.rpc import is_loopback

if TYPE_CHECKING:
    from atoll.cli.cluster.connection import Connection
    from atoll.client.client import AsyncClient

_ARRIVES_S: Final = 1.0
"""Seconds after the controller's answer in which its connection may still arrive."""


def check_reach(reached: Connection) -> list[Finding]:
    """Check whether the controller can dial this machine. Empty if the question cannot be asked."""
    try:
        address, came = reached.run(dialled_back)
    except (AtollError, OSError):
        return []
    return [judge_reach(address, came=came)]


def judge_reach(address: str, *, came: bool) -> Finding:
    """address: of this machine, as the controller sees it. came: whether it was dialled there."""
    if is_loopback(address):
        return Finding("reach", "info", "not known: the controller is on this machine, or behind a tunnel's end here")
    if came:
        return Finding("reach", "ok", f"the controller dials this machine at {address}")
    step = "to train here: atoll agent --behind-nat, or let the other machines through to all ports of this one"
    return Finding("reach", "info", f"the controller sees {address}, and cannot dial this machine there", step)


async def dialled_back(client: AsyncClient) -> tuple[str, bool]:
    """This machine's address as the controller sees it, and whether the controller could dial it there."""
    came = asyncio.Event()

    async def arrived(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.close()

    server = await asyncio.start_server(arrived, sock=_listening())
    async with server:
        address = await client.dial_back(server.sockets[0].getsockname()[1])
        with suppress(TimeoutError):
            await asyncio.wait_for(came.wait(), _ARRIVES_S)
    return address, came.is_set()


def _listening() -> socket.socket:
    """Listen at a free port of all of this machine's addresses."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
