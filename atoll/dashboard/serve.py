"""Serves the page until it is told to stop: of a command on this machine, or beside a controller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import uvicorn

from atoll.client.client import AsyncClient
from atoll.dashboard.app import dashboard
from atoll.dashboard.door import HOSTS
from atoll.errors import BadInput
from atoll.host import ports
from atoll.network.rpc import RenewedFiles, Tls, split_address

logger = logging.getLogger(__name__)

ADDRESS_FILE: Final = "dashboard"
"""In a controller's data folder: the page's address, with the token in it, for the controller's user alone."""


@dataclass(frozen=True, slots=True)
class PageSocket:
    """Socket of the page, the name of its URL, and the certificate for other machines."""

    bound: socket.socket
    name: str
    tls: Tls | None = None
    """None: on this machine alone."""

    @property
    def port(self) -> int:
        return int(self.bound.getsockname()[1])

    def url(self, token: str) -> str:
        return f"http{'s' * (self.tls is not None)}://{ports.host_and_port(self.name, self.port)}/?token={token}"


def listening(address: str, option: str = "--listen", tls: Tls | None = None) -> PageSocket:
    """A listening socket at HOST:PORT; port 0: any that is free. Raises BadInput.

    tls: with it other machines may be let in, over HTTPS."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    beyond = host not in HOSTS
    if beyond and tls is None:
        raise BadInput(
            f"{option} {address!r} is not on this machine alone: whoever sees the page may stop jobs. Leave it at "
            "127.0.0.1 and reach it by ssh -L 8265:127.0.0.1:8265 HOST. `atoll controller --dashboard` serves others, "
            "if it has certificates"
        )
    if not port.isdigit() or int(port) > 65535:
        raise BadInput(f"{option} {address!r} must be HOST:PORT with a port of 0 to 65535")
    try:
        bound = ports.listening(host, int(port))
    except socket.gaierror as error:
        raise BadInput(f"{option} {address}: {error.strerror}. Name an address of this machine") from error
    except OSError as error:
        raise BadInput(f"{option} {address} cannot be had: {error.strerror}. Choose another port") from error
    return PageSocket(bound, host, tls if beyond else None)


class _Server(uvicorn.Server):
    """Signals are its caller's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _renewed_certificate(tls: Tls) -> Callable[[ssl.SSLObject | ssl.SSLSocket, str, ssl.SSLContext], None]:
    """Return what gives each connection the newest certificate of the files, as an `sni_callback`."""
    files, newest = RenewedFiles(tls), None

    def present(connection: ssl.SSLObject | ssl.SSLSocket, name: str, context: ssl.SSLContext) -> None:
        nonlocal newest
        if files.newest():
            newest = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            newest.load_cert_chain(tls.certificate, tls.key)
        connection.context = newest or context

    return present


async def serve(client: AsyncClient, page: PageSocket, ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then end open streams. ready: is told the address, with the token in it."""
    token = secrets.token_urlsafe(24)
    config = uvicorn.Config(
        dashboard(client, token, page.port, frozenset({page.name})),
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
        ssl_certfile=page.tls.certificate if page.tls else None,
        ssl_keyfile=page.tls.key if page.tls else None,
    )
    config.load()
    if page.tls is not None and config.ssl is not None:
        config.ssl.sni_callback = _renewed_certificate(page.tls)
    server = _Server(config)

    async def until_stopped() -> None:
        await stop.wait()
        server.should_exit = True

    watching = asyncio.create_task(until_stopped(), name="dashboard: stop")
    ready(page.url(token))
    try:
        await server.serve(sockets=[page.bound])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@asynccontextmanager
async def beside_controller(
    page: PageSocket, identity: Tls | None, folder: Path, controller: str
) -> AsyncIterator[None]:
    """Serves while inside. identity: the client's certificate with which its pages ask, None where none is asked for.

    controller: what others are told; other machines call the page's host so too. The address is in `folder`, in a file
    of this user: what has a token is not logged."""
    told, stop = folder / ADDRESS_FILE, asyncio.Event()
    if page.tls is not None:
        page = replace(page, name=split_address(controller)[0])

    def ready(address: str) -> None:
        with os.fdopen(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(address + "\n")
        logger.info("dashboard: open the address in %s", told)

    async with AsyncClient([controller], tls=identity) as client:
        serving = asyncio.create_task(serve(client, page, ready, stop), name="dashboard")
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(serving)
            told.unlink(missing_ok=True)
