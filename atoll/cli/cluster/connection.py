"""Reads from the global options which cluster a command talks to, and as whom."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from atoll.errors import BadInput

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient
    from atoll.network.rpc import Tls

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Connection:
    """The global options, checked."""

    controllers: tuple[str, ...]
    tls: Tls | None
    timeout_s: float

    def client(self) -> AsyncClient:
        """A client for them; the caller closes it."""
        from atoll.client.client import AsyncClient

        return AsyncClient(self.controllers, tls=self.tls, timeout_s=self.timeout_s)

    def run(self, work: Callable[[AsyncClient], Awaitable[_T]]) -> _T:
        """Do `work` with a client, in an event loop of its own."""

        async def connected() -> _T:
            async with self.client() as client:
                return await work(client)

        return asyncio.run(connected())


@dataclass(frozen=True, slots=True)
class Options:
    """The global options as they were given; a command that talks to nobody does not mind what is in them."""

    controllers: str
    ca: Path | None
    certificate: Path | None
    key: Path | None
    timeout_s: float


def of(context: typer.Context) -> Connection:
    """The connection that the global options describe. Raises BadInput naming the one that is wrong."""
    given = context.find_object(Options)
    assert given is not None
    return described(given)


def described(given: Options) -> Connection:
    """Return the connection for given options."""
    # gRPC's C core writes failed handshakes to stderr, of a controller every one that somebody tries; whoever dials
    # says the same in one line.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if not sys.stderr.isatty():  # there somebody waits; a script gets the one line of the end
        logging.getLogger("atoll.client.leader_connection.waiting").setLevel(logging.ERROR)
    addresses = tuple(part.strip() for part in given.controllers.split(",") if part.strip())
    if not addresses:
        raise BadInput(f"--controller {given.controllers!r} names none. Give HOST:PORT, several with commas between")
    if not given.timeout_s > 0:
        raise BadInput(f"--timeout {given.timeout_s:g} must be positive. Leave it out for 10 s")
    return Connection(addresses, _tls(given.ca, given.certificate, given.key), given.timeout_s)


def _tls(ca: Path | None, certificate: Path | None, key: Path | None) -> Tls | None:
    from atoll.network.rpc import Tls

    if own := Tls.of_environment():
        ca, certificate, key = ca or own.ca, certificate or own.certificate, key or own.key
    given = (ca, certificate, key)
    if all(path is None for path in given):
        return None
    if ca is None or certificate is None or key is None:
        names = [name for name, path in zip(("--tls-ca", "--tls-cert", "--tls-key"), given, strict=True) if not path]
        raise BadInput(f"{' and '.join(names)} missing: TLS needs all three. Or name their folder in ATOLL_TLS_DIR")
    return Tls(ca, certificate, key)
