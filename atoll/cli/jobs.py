"""atoll jobs, status, adjust, cancel, nodes."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from atoll.cli import connection, terminal, wire

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Its id, or its name (then the newest of that name).")]


def jobs(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that are over.")] = False,
    as_json: Json = False,
) -> None:
    """List jobs."""
    found = connection.of(context).run(lambda client: client.jobs(ended=everything))
    if as_json:
        terminal.print_json({"jobs": [wire.to_plain(job) for job in found]})
        return
    from atoll.cli import views

    if not found:
        terminal.note(
            "no jobs. Submit one: atoll submit train.py" if everything else "no living jobs. All: atoll jobs -a"
        )
        return
    now_s = time.time()
    terminal.print_table(views.JOB_COLUMNS, [views.job_row(job, now_s) for job in found], right=views.JOB_NUMBERS)


def status(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """Show one job: phase and reason, progress, and what each worker does."""
    found = connection.of(context).run(lambda client: client.get(job))
    if as_json:
        terminal.print_json(wire.to_plain(found))
        return
    from atoll.cli import views

    for line in views.status_lines(found, time.time()):
        print(line)
    if found.workers:
        print()
        rows = [views.worker_row(worker) for worker in found.workers]
        terminal.print_table(views.WORKER_COLUMNS, rows, right=views.WORKER_NUMBERS)
    for worker in found.workers:
        if wire.state(worker.status) == "exited" and worker.status.reason:
            print(
                f"rank {worker.rank}: exit code {worker.status.exit_code}, {terminal.printable(worker.status.reason)}"
            )
    sys.stdout.flush()


def adjust(
    context: typer.Context,
    job: JobName,
    rate: Annotated[float, typer.Option(metavar="SHARE", help="Of each gradient left out of a step, e.g. 0.995.")],
    as_json: Json = False,
) -> None:
    """Change how a job trains while it runs; later runs of it keep the change. For strategy stale-sparse."""
    found = connection.of(context).run(lambda client: client.adjust(job, rate=rate))
    if as_json:
        terminal.print_json(wire.to_plain(found))
    else:
        plan = found.plan
        print(f"{found.id} rate {plan.rate * 100:.2f} % from step {plan.from_step} (plan {plan.id})")
        terminal.note(f"see it: atoll status {found.id}")


def cancel(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """Stop a job: its workers are gone within 5 s. Repeating it is harmless."""
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
    from atoll.cli import views

    if not reply.nodes:
        terminal.note("no nodes. Join this machine: atoll agent --controller HOST:PORT")
        return
    terminal.print_table(views.NODE_COLUMNS, [views.node_row(node) for node in reply.nodes], right=views.NODE_NUMBERS)
