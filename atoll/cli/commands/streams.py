"""atoll logs, events: what was written and what happened, once or as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.jobs import JobName
from atoll.cli.render import terminal, wire
from atoll.cli.render.log_lines import LogLines

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")]
JsonLines = Annotated[bool, typer.Option("--json", help="JSON lines on stdout; one document without --follow.")]


def logs(
    context: typer.Context,
    job: JobName,
    *,
    follow: Follow = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only this worker's, as it wrote it. All ranks where left out.")
    ] = None,
    tail: Annotated[int, typer.Option(min=0, help="Only the newest lines; 0 = all that is kept.")] = 0,
    as_json: JsonLines = False,
) -> None:
    """Print what the workers wrote."""
    document: list[dict[str, object]] = []
    write: Callable[[str], None] = partial(print, flush=follow)

    def emit(run: int, number: int, text: str) -> None:
        entry: dict[str, object] = {"run": run, "rank": number, "text": text}
        if as_json and follow:
            terminal.print_json(entry)
        elif as_json:
            document.append(entry)
        else:
            shown = terminal.printable(text) if sys.stdout.isatty() else text
            write(shown if rank is not None else f"[{number}] {shown}")

    async def show(client: AsyncClient) -> None:
        lines = LogLines()
        async for chunk in client.logs(job, rank=rank, follow=follow, tail_lines=tail):
            for line in lines.of(chunk):
                emit(*line)
        for line in lines.rest():
            emit(*line)

    if follow and not as_json and terminal.is_watched(sys.stdout):
        from atoll.cli.render.bar import BarBelow

        with BarBelow() as below:
            write = below.line
            connection.of(context).run(lambda client: below.while_shown(client, job, show(client)))
    else:
        connection.of(context).run(show)
    if as_json and not follow:
        terminal.print_json({"lines": document})


def events(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Those of a job; of the cluster where left out.")] = "",
    follow: Follow = False,
    as_json: JsonLines = False,
) -> None:
    """Print what happened and why: phases, plans, workers, nodes, checkpoints."""
    from atoll.cli.render import views

    document: list[dict[str, object]] = []

    async def show(client: AsyncClient) -> None:
        async for event in client.events(job, follow=follow):
            if as_json and follow:
                terminal.print_json(wire.to_plain(event))
            elif as_json:
                document.append(wire.to_plain(event))
            else:
                print(views.event_line(event), flush=True)

    connection.of(context).run(show)
    if as_json and not follow:
        terminal.print_json({"events": document})
