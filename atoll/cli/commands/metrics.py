"""atoll metrics: what a job's script reported, as a table, a plot, or for other tools."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.jobs import JobName, Json
from atoll.cli.render import curves, terminal
from atoll.errors import BadInput


def metrics(
    context: typer.Context,
    job: JobName,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Of these numbers; all that it reports else.")
    ] = None,
    *,
    points: Annotated[
        int, typer.Option(metavar="N", min=0, help="At most so many of each curve, spread evenly; 0: all.")
    ] = 0,
    plot: Annotated[bool, typer.Option("--plot", help="Draw them on the terminal.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="A line a point: name, step, run, unix_s, value.")] = False,
    as_json: Json = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write event files for TensorBoard there.")
    ] = None,
) -> None:
    """Show the numbers that a job's script reports (run.report), over its steps.

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
        terminal.note(f"{job} reports nothing. In its script: run.report(loss=loss.item())")
    elif plot:
        size = shutil.get_terminal_size()
        for curve in found:
            print(curves.drawn(curve, columns=min(size.columns, 120), rows=max(min(size.lines // len(found), 20), 12)))
    else:
        terminal.print_table(curves.COLUMNS, [curves.row(curve) for curve in found], right=curves.NUMBERS)
