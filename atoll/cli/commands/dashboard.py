"""atoll dashboard: the cluster in a browser."""

from __future__ import annotations

import asyncio
import webbrowser
from typing import Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands import daemons
from atoll.cli.render import terminal


def dashboard(
    context: typer.Context,
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where, on this machine; port 0: any that is free.")
    ] = "127.0.0.1:8265",
    browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Show jobs, curves, plans, nodes and links in a browser, until Ctrl-C.

    It asks the cluster with your certificate; the address that it prints has a token, for you alone.
    """
    reached = connection.of(context)
    server = daemons.need("atoll.dashboard.serve", "dashboard")
    page = server.listening(listen)

    def ready(address: str) -> None:
        print(address, flush=True)
        terminal.note("open this address in a browser; Ctrl-C ends it")
        if browser:
            webbrowser.open(address)

    async def serve(stop: asyncio.Event) -> None:
        async with reached.client() as client:
            await server.serve(client, page, ready, stop)

    daemons.run_until_told(serve)
