"""atoll jobs, status, adjust, plans, cancel, nodes, rm, top."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands import options
from atoll.cli.commands.options import JobName, Json
from atoll.cli.render import terminal, wire
from atoll.cli.render.help import option
from atoll.errors import AtollError, BadInput, Conflict, NotFound

if TYPE_CHECKING:
    from atoll.cli.render.overview import Overview
    from atoll.client.client import AsyncClient


def jobs(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", "-a", help="List ended jobs too.")] = False,
    as_json: Json = False,
) -> None:
    """List jobs that wait or run; --all adds those that ended."""
    found = connection.of(context).run(lambda client: client.jobs(ended=everything))
    if as_json:
        terminal.print_json({"jobs": [wire.to_plain(job) for job in found]})
        return
    from atoll.cli.render import views

    if not found:
        terminal.note(
            "no jobs. Submit one: atoll submit train.py"
            if everything
            else "no live jobs. List ended ones too: atoll jobs -a"
        )
        return
    now_s = time.time()
    rows = [views.job_row(job, now_s, brief=sys.stdout.isatty()) for job in found]
    terminal.print_table(views.JOB_COLUMNS, rows)


def status(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """Show one job: its phase and why, its progress, and its workers."""
    found = connection.of(context).run(lambda client: client.get(job))
    if as_json:
        terminal.print_json(wire.to_plain(found))
        return
    from atoll.cli.render import views

    for line in views.status_lines(found, time.time()):
        print(line)
    if found.workers:
        print()
        rows = [views.worker_row(worker) for worker in found.workers]
        terminal.print_table(views.WORKER_COLUMNS, rows)
    for worker in found.workers:
        if wire.state(worker.status) == "exited" and worker.status.reason:
            print(
                f"rank {worker.rank}: exit code {worker.status.exit_code}, {terminal.printable(worker.status.reason)}"
            )
    sys.stdout.flush()


def adjust(
    context: typer.Context,
    job: JobName,
    *,
    total_batch: Annotated[
        int, option("N", "Train N samples a step, of all workers together; 0 changes nothing.", "--total-batch", min=0)
    ] = 0,
    strategy: Annotated[str, option("NAME", "Train by this strategy from the next step boundary on, in place.")] = "",
    shares: Annotated[str, option("A:B:...", "Split the batch by these shares, one for each rank, e.g. 3:2:1.")] = "",
    unpin: Annotated[
        list[str] | None, option("NAME", "Let the controller decide this again, e.g. total-batch; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Change how a job trains while it runs.

    The controller no longer changes what is set here, until --unpin leaves it to the controller again.

    atoll adjust vit-3f9a --total-batch 512
    """
    given = parse_shares(shares)
    params = options.given(context)
    found = connection.of(context).run(
        lambda client: client.adjust(
            job, params=params, total_batch=total_batch, shares=given, strategy=strategy, unpin=unpin or ()
        )
    )
    if as_json:
        terminal.print_json(wire.to_plain(found))
        return
    from atoll.cli.render import views

    print(f"{found.id} {views.pins_text(found)}, plan {found.plan.id} from step {found.plan.from_step}")
    terminal.note(f"see it: atoll status {found.id}")


def parse_shares(text: str) -> list[float]:
    """'3:2:1' -> [3, 2, 1]. Raises BadInput."""
    try:
        return [float(part) for part in text.split(":")] if text else []
    except ValueError as error:
        raise BadInput(
            f"--shares {text!r} must be numbers with ':' between them, one for each rank, e.g. 3:2:1"
        ) from error


def plans(
    context: typer.Context,
    job: JobName,
    run: Annotated[int, option("N", "List the plans of this run; 0 is the newest.", min=0)] = 0,
    of: Annotated[str, option("PLAN", "Print only the input from which this plan was decided.", "--input")] = "",
    as_json: Json = False,
) -> None:
    """List a job's plans: what the controller decided, when and why.

    A plan's row compares predicted and measured seconds of a step. Rows a1, a2, … decide which devices take part; row
    placement decides which machines keep copies of the state of others.
    """
    reply = connection.of(context).run(lambda client: client.plans(job, run))
    placement = reply.placement if reply.HasField("placement") else None
    if of:
        inputs = {str(decided.plan.id): decided.input for decided in reply.plans}
        inputs |= {f"a{admission.id}": admission.input for admission in reply.admissions}
        inputs |= {"placement": placement.input} if placement else {}
        if of not in inputs:
            raise NotFound(f"job {job} has no plan {of} in that run. `atoll plans {job}` lists them")
        print(inputs[of])
        return
    if as_json:
        terminal.print_json(wire.to_plain(reply))
        return
    from atoll.cli.render import views

    if not reply.plans:
        terminal.note("no plans: no such run, or it has not begun")
        return
    terminal.print_table(views.PLAN_COLUMNS, views.plan_rows(reply))
    newest = reply.plans[-1].plan
    terminal.note(f"compute one again: atoll plans {job} --input {newest.id} | atoll decide {newest.planner}")


def cancel(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """Stop a job.

    Its workers end within 5 s, or when they have saved. Repeating the command is harmless.
    """
    found = connection.of(context).run(lambda client: client.cancel(job))
    if as_json:
        terminal.print_json(wire.to_plain(found))
    else:
        print(f"{found.id} {wire.phase(found)}")
        terminal.note(f"see it end: atoll status {found.id}")


def nodes(context: typer.Context, as_json: Json = False) -> None:
    """List the machines of the cluster and their devices."""
    reply = connection.of(context).run(lambda client: client.nodes())
    if as_json:
        terminal.print_json({"nodes": [wire.to_plain(node) for node in reply.nodes]})
        return
    from atoll.cli.render import views

    if not reply.nodes:
        terminal.note("no nodes. Join this machine: atoll agent --controller HOST:PORT")
        return
    terminal.print_table(views.NODE_COLUMNS, [views.node_row(node) for node in reply.nodes])
    terminal.print_lines(views.island_lines(reply.nodes))


def rm(
    context: typer.Context,
    job: JobName,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Leave the checkpoints on disk and in the object store.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove the job without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Remove an ended job: its checkpoints, logs, events and records.

    The command lists what there is on all nodes and in the object store, and asks.
    """
    from atoll.client.client import ENDED

    connected = connection.of(context)
    found = connected.run(lambda client: client.get(job))
    if found.phase not in ENDED:
        state = f"job {found.id} is {wire.phase(found)}"
        raise Conflict(f"{state}; only ended jobs can be removed. `atoll cancel {found.id}` ends it")
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise BadInput(
                f"without a terminal, `atoll rm` cannot ask whether to remove {found.id}. Confirm with --yes"
            )
        from atoll.cli.render import views

        kept = None if keep_checkpoints else connected.run(lambda client: client.checkpoints(found.id))
        for line in views.removal_lines(found, kept, time.time()):
            terminal.note(line)
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


_EVERY_S: Final = 1.0
_ANSWER_S: Final = 2.0


def top(context: typer.Context) -> None:
    """Show jobs and nodes live, until Ctrl-C; in a pipe, once."""
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
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    shown = await _look(client)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            trouble = ""
            while True:
                parts = shown.rich(console.size.height - bool(trouble))
                live.update(Group(*parts, *([Text(trouble, "bold red")] if trouble else [])), refresh=True)
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
