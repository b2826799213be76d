"""atoll rm."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.jobs import JobName, Json
from atoll.cli.render import terminal, wire
from atoll.errors import BadInput, Conflict

if TYPE_CHECKING:
    from atoll.v1.jobs_pb2 import CheckpointsReply


def rm(
    context: typer.Context,
    job: JobName,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="On disk and in the object store they stay where they are.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove a job that is over: its checkpoints on all nodes and in its object store, its logs, events and records.

    Says what there is, and asks."""
    from atoll.client.client import ENDED

    connected = connection.of(context)
    found = connected.run(lambda client: client.get(job))
    if found.phase not in ENDED:
        state = f"job {found.id} is {wire.phase(found)}"
        raise Conflict(f"{state}; only what is over can be removed. `atoll cancel {found.id}` ends it")
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise BadInput(f"there is nobody to ask whether {found.id} shall be removed. Say so with --yes")
        _say(found, None if keep_checkpoints else connected.run(lambda client: client.checkpoints(found.id)))
        if not typer.confirm(f"Remove {found.id} for good?", err=True):
            terminal.note("nothing was removed")
            raise typer.Exit(1)
    reply = connected.run(lambda client: client.remove(found.id, keep_checkpoints=keep_checkpoints))
    if as_json:
        terminal.print_json(wire.to_plain(reply))
        return
    print(f"{reply.job} removed")
    for note in reply.notes:
        terminal.note(terminal.printable(note))


def _say(job: object, checkpoints: CheckpointsReply | None) -> None:
    """Print what exists of the job."""
    from atoll.cli.render import views

    for line in views.removal_lines(job, checkpoints, time.time()):  # type: ignore[arg-type]
        terminal.note(line)
