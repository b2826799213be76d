"""atoll top."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Final

import typer

from atoll.cli.cluster import connection
from atoll.cli.render import terminal
from atoll.errors import AtollError

if TYPE_CHECKING:
    from atoll.cli.render.overview import Overview
    from atoll.client.client import AsyncClient

_EVERY_S: Final = 1.0
_ANSWER_S: Final = 2.0


def top(context: typer.Context) -> None:
    """Show jobs and nodes, live, until Ctrl-C; in a pipe once."""
    connected = connection.of(context)
    if not sys.stdout.isatty():
        connected.run(_print_once)
        return
    connected.run(_show)


async def _look(client: AsyncClient) -> Overview:
    from atoll.cli.render.overview import Overview

    return Overview(await client.jobs(ended=True), await client.nodes(), time.time())


async def _print_once(client: AsyncClient) -> None:
    for line in (await _look(client)).lines():
        print(line)


async def _show(client: AsyncClient) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from atoll.cli.render.overview import stacked

    console = Console(highlight=False)
    shown = await _look(client)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            trouble = ""
            while True:
                parts = shown.rich(console.size.height - bool(trouble))
                live.update(stacked([*parts, *([Text(trouble, "bold red")] if trouble else [])]), refresh=True)
                await asyncio.sleep(_EVERY_S)
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        shown = await _look(client)
                    trouble = ""
                except TimeoutError:
                    trouble = f"no controller answers; this is {time.time() - shown.seen_unix_s:.0f} s old"
                except AtollError as error:
                    trouble = terminal.printable(str(error))
    except asyncio.CancelledError:
        pass  # Ctrl-C: that is how it is left
