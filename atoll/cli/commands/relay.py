"""atoll relay: joins connections of machines that cannot dial each other, in the foreground."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.commands.daemons import need, need_linux, read_token, run_until_told


def relay(
    *,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where agents reach it.")] = "0.0.0.0:7701",
    secret_file: Annotated[
        Path, typer.Option(help="At least 32 characters that the controller has too (--relay-secret-file).")
    ],
    metrics: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Serve /metrics for Prometheus.")] = None,
) -> None:
    """Run a relay: joins links to nodes behind NAT. A controller starts one by itself; this is for another machine."""
    need_linux()
    server = need("atoll.relay.server", "controller")
    exposition = need("atoll.telemetry.prometheus", "controller")
    if metrics is not None:
        exposition.check_address("metrics", metrics)
    chosen = server.Relay(server.read_secret(read_token(secret_file)))
    address = chosen.listen(listen)

    async def serve(stop: asyncio.Event) -> None:
        running = asyncio.create_task(chosen.run(), name="relay")
        running.add_done_callback(lambda _: stop.set())
        async with exposition.exposed(metrics, chosen.measures) as url:
            print(address, flush=True)
            logging.getLogger(__name__).info("relaying on %s%s", address, url and f", measurements on {url}")
            await stop.wait()
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()

    run_until_told(serve)
