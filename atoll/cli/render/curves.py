"""Curves of a job's reported numbers, for terminals and for other tools."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from atoll.cli.render.terminal import printable
from atoll.errors import BadInput
from atoll.v1.jobs_pb2 import Curve

COLUMNS: Final = ("NAME", ">POINTS", "STEPS", ">FIRST", ">LAST", ">LEAST", ">AT", ">MOST", ">AT")


def row(curve: Curve) -> tuple[str, ...]:
    """A line of the table: where the curve began, where it is, and its extremes."""
    steps, values = curve.steps, curve.values
    finite = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    extremes = [text for found in (min(finite), max(finite)) for text in _at(found)] if finite else ["-"] * 4
    return (
        *(printable(curve.name), str(len(steps)), f"{steps[0]}..{steps[-1]}"),
        *(f"{values[0]:.5g}", f"{values[-1]:.5g}", *extremes),
    )


def _at(found: tuple[float, int]) -> tuple[str, str]:
    value, step = found
    return f"{value:.5g}", str(step)


def csv_rows(curve: Curve) -> Iterator[tuple[object, ...]]:
    """name, step, run, unix_s, value of each point; NaN and infinity as Python writes them."""
    for step, run, unix_s, value in zip(curve.steps, curve.runs, curve.unix_s, curve.values, strict=True):
        yield curve.name, step, run, f"{unix_s:.3f}", repr(value)


def to_plain(curve: Curve) -> dict[str, Any]:
    """Return the curve for --json: lists of one length; values that are not finite are null."""
    values = [value if math.isfinite(value) else None for value in curve.values]
    runs, unix_s = list(curve.runs), list(curve.unix_s)
    return {"name": curve.name, "steps": list(curve.steps), "values": values, "runs": runs, "unix_s": unix_s}


def drawn(curve: Curve, *, columns: int, rows: int) -> str:
    """The curve drawn in characters, without colours."""
    points = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if math.isfinite(value)]
    name = printable(curve.name)
    if len(points) < 2:
        return f"{name}: {len(points)} finite points are too few to draw"
    figure = importlib.import_module("plotext").figure  # takes a tenth of a second
    figure.clear()
    signal = figure.signal([step for step, _ in points], [value for _, value in points])
    signal.lines()
    figure.draw(signal)
    figure.plot_size(columns, rows)
    figure.title(name)
    return str(figure.build().string(colorless=True))


def write_event_files(curves: Iterable[Curve], folder: Path) -> int:
    """TensorBoard's own files, with the wall clock of each point. Returns how many points. Raises BadInput where its
    package is missing or the folder cannot be written."""
    try:
        writer_of = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ModuleNotFoundError as error:
        raise BadInput(
            f"--tensorboard needs {error.name}, which is not installed: pip install torch tensorboard"
        ) from error
    try:
        with writer_of(str(folder)) as writer:
            points = [
                (curve.name, *one)
                for curve in curves
                for one in zip(curve.steps, curve.values, curve.unix_s, strict=True)
            ]
            for name, step, value, unix_s in points:
                writer.add_scalar(name, value, global_step=step, walltime=unix_s)
            return len(points)
    except OSError as error:
        raise BadInput(f"--tensorboard {folder}: {error.strerror}. Name a folder that you may write to") from error
