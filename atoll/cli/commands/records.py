"""atoll logs, events, metrics, trace: what is recorded of a job, once or as it comes."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.daemons import need
from atoll.cli.commands.options import JobName, Json
from atoll.cli.render import curves, terminal, wire
from atoll.cli.render.help import option
from atoll.cli.render.log_lines import LogLines
from atoll.errors import BadInput

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient
    from atoll.v1.common_pb2 import Event
    from atoll.v1.jobs_pb2 import Job

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, with --follow one on each line.")
]


def logs(
    context: typer.Context,
    job: JobName,
    *,
    follow: Follow = False,
    rank: Annotated[
        int | None, option("N", "Print the output of this worker, as it wrote it.", min=0, show_default="all")
    ] = None,
    tail: Annotated[int, option("N", "Print the newest N lines; 0 prints all that are kept.", min=0)] = 0,
    as_json: JsonLines = False,
) -> None:
    """Print the output of a job's workers."""
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
        from atoll.cli.render.follow import LogScreen

        screen = LogScreen()
        write = screen.text
        connection.of(context).run(lambda client: screen.show(client, job, show(client)))
    else:
        connection.of(context).run(show)
    if as_json and not follow:
        terminal.print_json({"lines": document})


def events(
    context: typer.Context,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Id or name of a job.", show_default="the whole cluster")
    ] = "",
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


def metrics(
    context: typer.Context,
    job: JobName,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Names of the numbers to show.", show_default="all")
    ] = None,
    *,
    points: Annotated[int, option("N", "Show at most N points of each curve, spread evenly; 0 shows all.", min=0)] = 0,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the curves on the terminal.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print a line for each point: name, step, run, unix_s, value.")
    ] = False,
    as_json: Json = False,
    tensorboard: Annotated[Path | None, option("FOLDER", "Write event files for TensorBoard to this folder.")] = None,
) -> None:
    """Show the numbers that a job's script reports with run.report, over its steps.

    atoll metrics vit-3f9a loss --plot
    """
    if sum((plot, as_csv, as_json, tensorboard is not None)) > 1:
        raise BadInput("--plot, --csv, --json and --tensorboard exclude each other. Choose one")
    found = connection.of(context).run(lambda client: client.curves(job, names or (), most_points=points))
    if as_json:
        terminal.print_json({"curves": [curves.to_plain(curve) for curve in found]})
    elif as_csv:
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(("name", "step", "run", "unix_s", "value"))
        out.writerows(row for curve in found for row in curves.csv_rows(curve))
    elif tensorboard is not None:
        written = curves.write_event_files(found, tensorboard)
        terminal.note(f"{written} points in {tensorboard}. See them: tensorboard --logdir {tensorboard}")
    elif not found:
        terminal.note(f"{job} has reported no numbers. Report them in the script: run.report(loss=loss.item())")
    elif plot:
        size = shutil.get_terminal_size()
        for curve in found:
            print(curves.drawn(curve, columns=min(size.columns, 120), rows=max(min(size.lines // len(found), 20), 12)))
    else:
        terminal.print_table(curves.COLUMNS, [curves.row(curve) for curve in found])


def trace(
    context: typer.Context,
    job: JobName,
    *,
    endpoint: Annotated[
        str | None,
        option(
            "URL",
            "Send to this collector, named without /v1/traces. OTEL_EXPORTER_OTLP_ENDPOINT may name it instead.",
            show_default="http://localhost:4318",
        ),
    ] = None,
    output: Annotated[
        Path | None, option("FILE", "Write OTLP JSON to this file and send nothing.", "--output", "-o")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print OTLP JSON on stdout and send nothing.")] = False,
    follow: Follow = False,
) -> None:
    """Send a job's events to an OpenTelemetry collector, as a trace.

    The command makes the trace from recorded events, so training does not slow down. Sent twice, it is the same trace.

    atoll trace vit-3f9a --endpoint http://localhost:4318
    """
    if sum((endpoint is not None, output is not None, as_json)) > 1:
        raise BadInput("--endpoint, --output and --json exclude each other. Choose one")
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise BadInput(f"--output {output} is no file in a folder that is there")
    otlp = need("atoll.cli.traces.otlp", "otel")
    url = otlp.traces_url(endpoint) if output is None and not as_json else ""

    async def recorded(client: AsyncClient) -> tuple[Job, list[Event]]:
        found = await client.get(job)
        return found, [event async for event in client.events(found.id, follow=follow)]

    found, events = connection.of(context).run(recorded)
    from atoll.cli.traces.spans import spans_of, trace_id

    spans = spans_of(found, events)
    over = [span for span in spans if span.end_unix_s is not None]
    told = f"{len(over)} spans of {found.id}, trace {trace_id(found):032x}"
    if as_json:
        terminal.print_json(otlp.as_otlp_json(found, over))
    elif output is not None:
        _write(output, json.dumps(otlp.as_otlp_json(found, over)))
        print(f"{output}: {told}")
    else:
        otlp.send(found, over, url)
        print(f"{url}: {told}")
    if left := [span.name for span in spans if span.end_unix_s is None]:
        terminal.note(f"not over, so left out: {', '.join(left)}. The same command adds them later, or --follow")


def _write(path: Path, line: str) -> None:
    try:
        path.write_text(f"{line}\n")
    except OSError as error:
        raise BadInput(f"--output {path}: {error.strerror}. Name a file that you may write") from error
