"""atoll checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.jobs import JobName, Json
from atoll.cli.render import terminal, wire

SourceName = Annotated[
    str, typer.Argument(metavar="JOB|DIRECTORY|URL", help="Whose checkpoint: a job's, or what lies there.")
]
StepNumber = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="Of this step; the newest sound one else.")
]


def checkpoints(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """List a job's checkpoints: in which tier, of which step, how much of them is there, and whether they are sound."""
    reply = connection.of(context).run(lambda client: client.checkpoints(job))
    if as_json:
        terminal.print_json(wire.to_plain(reply))
        return
    from atoll.cli.render import views

    if reply.checkpoints:
        rows = [views.checkpoint_row(found) for found in reply.checkpoints]
        terminal.print_table(views.CHECKPOINT_COLUMNS, rows, right=views.CHECKPOINT_NUMBERS)
    else:
        terminal.note(f"no checkpoint of {reply.job} was found")
    for note in [*dict.fromkeys(found.trouble for found in reply.checkpoints if found.trouble), *reply.notes]:
        terminal.note(terminal.printable(note))
