"""Serves the page on this machine until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from atoll.dashboard.app import dashboard
from atoll.dashboard.door import HOSTS
from atoll.errors import BadInput

if TYPE_CHECKING:
    from atoll.client import AsyncClient


def listening(address: str) -> socket.socket:
    """A listening socket at HOST:PORT of this machine; port 0: any that is free. Raises BadInput."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host not in HOSTS:
        raise BadInput(
            f"--listen {address!r} is not on this machine alone: whoever sees the page may stop jobs. Leave it at "
            "127.0.0.1 and reach it by ssh -L 8265:127.0.0.1:8265 HOST"
        )
    if not port.isdigit() or int(port) > 65535:
        raise BadInput(f"--listen {address!r} must be HOST:PORT with a port of 0 to 65535")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, int(port)))
        bound.listen()
    except OSError as error:
        bound.close()
        raise BadInput(f"--listen {address} cannot be had: {error.strerror}. Choose another port") from error
    return bound


class _Server(uvicorn.Server):
    """Signals are its caller's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(client: AsyncClient, bound: socket.socket, ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then end open streams. ready: is told the address, with the token in it."""
    host, port = bound.getsockname()[:2]
    token = secrets.token_urlsafe(24)
    config = uvicorn.Config(
        dashboard(client, token, port), log_level="warning", lifespan="off", timeout_graceful_shutdown=1
    )
    server = _Server(config)

    async def until_stopped() -> None:
        await stop.wait()
        server.should_exit = True

    watching = asyncio.create_task(until_stopped(), name="dashboard: stop")
    ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}")
    try:
        await server.serve(sockets=[bound])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
