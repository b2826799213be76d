"""Curves: the numbers that scripts report, by step, in a SQLite file beside the controller's logs."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.controller.services.sqlite_file import SqliteFile
from atoll.v1 import common_pb2

MAX_CURVES: Final = 256
"""Most curves of a job. Scripts choose the names, perhaps a new one each step."""
MAX_POINTS: Final = 50_000
"""Most points of a curve. Beyond it points are removed where they are densest, so a long run keeps its shape."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS curve (
  id INTEGER PRIMARY KEY, job TEXT NOT NULL, name TEXT NOT NULL, points INTEGER NOT NULL DEFAULT 0, UNIQUE (job, name));
CREATE TABLE IF NOT EXISTS point (
  curve INTEGER NOT NULL, step INTEGER NOT NULL, run INTEGER NOT NULL, unix_s REAL NOT NULL, value REAL,
  PRIMARY KEY (curve, step)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class KeptCurve:
    """One number over the job's steps, which rise. `values` may be NaN or infinite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    runs: tuple[int, ...]
    unix_s: tuple[float, ...]


class CurveStore:
    """Curves of all jobs. Used by one thread alone, which its first use decides. Its methods raise OSError."""

    def __init__(self, path: Path, max_points: int = MAX_POINTS) -> None:
        self._file = SqliteFile(path, _SCHEMA)
        self._max_points = max_points
        self._newest_run: dict[str, int] = {}  # by job, of what was added by this process

    def add(self, job: str, run: int, unix_s: float, reported: Sequence[common_pb2.Metrics]) -> None:
        """Keep what a run reported, in place of what was kept of these steps. What an earlier run said of later ones is
        gone too: its steps were lost. What comes late of an earlier run is not kept at all."""
        if not reported or run < self._newest_run.get(job, 0):
            return
        self._newest_run[job] = run
        with self._file.transaction() as database:
            first = min(metrics.step for metrics in reported)
            database.execute(
                "DELETE FROM point WHERE curve IN (SELECT id FROM curve WHERE job = ?) AND step >= ? AND run < ?",
                (job, first, run),
            )
            for metrics in reported:
                for name, value in metrics.values.items():
                    self._keep(database, job, name, (metrics.step, run, unix_s, value))

    def names(self, job: str) -> list[str]:
        """Return the names of the job's curves, sorted."""
        with self._file.transaction() as database:
            return [name for (name,) in database.execute("SELECT name FROM curve WHERE job = ? ORDER BY name", (job,))]

    def read(self, job: str, name: str, most_points: int = 0) -> KeptCurve:
        """One curve. most_points: spread evenly, its last among them; 0: all that are kept."""
        query = (
            "SELECT step, value, run, unix_s FROM point JOIN curve ON curve.id = point.curve "
            "WHERE job = ? AND name = ? ORDER BY step"
        )
        with self._file.transaction() as database:
            points = _spread(database.execute(query, (job, name)).fetchall(), most_points)
        steps, values, runs, unix_s = zip(*points, strict=True) if points else ((), (), (), ())
        return KeptCurve(steps, tuple(map(_number, values)), runs, unix_s)

    def remove(self, job: str) -> None:
        """Forget a job."""
        self._newest_run.pop(job, None)
        with self._file.transaction() as database:
            database.execute("DELETE FROM point WHERE curve IN (SELECT id FROM curve WHERE job = ?)", (job,))
            database.execute("DELETE FROM curve WHERE job = ?", (job,))

    def close(self) -> None:
        self._file.close()

    def _keep(self, database: sqlite3.Connection, job: str, name: str, point: tuple[int, int, float, float]) -> None:
        found = database.execute("SELECT id, points FROM curve WHERE job = ? AND name = ?", (job, name)).fetchone()
        if found is None:
            count = database.execute("SELECT COUNT(*) FROM curve WHERE job = ?", (job,)).fetchone()[0]
            if count >= MAX_CURVES:
                return
            number = database.execute("INSERT INTO curve (job, name) VALUES (?, ?)", (job, name)).lastrowid
            found = (number, 0)
        number, points = found
        database.execute(
            "INSERT OR REPLACE INTO point (curve, step, run, unix_s, value) VALUES (?, ?, ?, ?, ?)", (number, *point)
        )
        points += 1
        if points > self._max_points:  # counted with those that were replaced: it may thin a little early
            points = self._thin(database, number)
        database.execute("UPDATE curve SET points = ? WHERE id = ?", (points, number))

    def _thin(self, database: sqlite3.Connection, number: int) -> int:
        """Leave half as many points, evenly over the steps: of each stretch its newest, so the last stays. Returns how
        many are there."""
        steps = [
            step for (step,) in database.execute("SELECT step FROM point WHERE curve = ? ORDER BY step", (number,))
        ]
        if len(steps) <= self._max_points:
            return len(steps)
        stretch = (steps[-1] - steps[0] + 1) / (self._max_points / 2)
        kept = {int((steps[-1] - step) / stretch): step for step in steps}
        gone = set(steps).difference(kept.values())
        database.executemany("DELETE FROM point WHERE curve = ? AND step = ?", ((number, step) for step in gone))
        return len(steps) - len(gone)


def _number(value: float | None) -> float:
    """SQLite keeps NaN as NULL."""
    return math.nan if value is None else value


def _spread(points: list[tuple[int, float, int, float]], most: int) -> list[tuple[int, float, int, float]]:
    """Return at most `most` of the points, evenly spaced, with the last one."""
    if not most or len(points) <= most:
        return points
    return [points[(at + 1) * len(points) // most - 1] for at in range(most)]
