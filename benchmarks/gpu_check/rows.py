"""Rows of a stage's result, written down one by one, so that a stage that is killed leaves what it had."""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

Outcome = Literal["passed", "failed", "skipped"]
Measured = tuple[bool, str, dict[str, float]]
"""Whether a row holds, its text, its figures."""
MAX_TEXT: Final = 4000
"""Characters of a row's text that are kept: its end, where a traceback says what happened."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    outcome: Outcome
    text: str
    figures: dict[str, float] = field(default_factory=dict)


class Rows:
    """Appends rows to a file, one JSON document a line."""

    def __init__(self, path: Path, out: Path) -> None:
        """out: where a stage may leave files of its own."""
        self._path, self.out = path, out

    def add(self, name: str, outcome: Outcome, text: str = "", **figures: float) -> None:
        row = Row(name, outcome, text[-MAX_TEXT:], figures)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(f"  {row.outcome}: {row.name}: {row.text}", flush=True)

    def check(self, name: str, holds: bool, text: str = "", **figures: float) -> None:
        self.add(name, "passed" if holds else "failed", text, **figures)

    def skip(self, name: str, why: str) -> None:
        self.add(name, "skipped", why)

    def measure(self, name: str, call: Callable[[], Measured], limit_s: float) -> dict[str, float]:
        """Add a row for what `call` returns in a process of its own, forked from this one. Returns its figures.

        A CUDA error, a crash or a hang in it ends that process alone."""
        measured = _in_process("fork", call, limit_s) or _in_process("spawn", call, limit_s)
        assert measured is not None
        holds, text, figures = measured
        self.check(name, holds, text, **figures)
        return figures


def _in_process(way: Literal["fork", "spawn"], call: Callable[[], Measured], limit_s: float) -> Measured | None:
    """Return None where this process has touched CUDA, so that a fork of it cannot."""
    ours, its = multiprocessing.Pipe(duplex=False)
    context: Any = multiprocessing.get_context(way)
    process = context.Process(target=_answer, args=(call, its))
    process.start()
    its.close()
    try:
        measured: Measured | None = ours.recv() if ours.poll(limit_s) else (False, f"took more than {limit_s:g} s", {})
    except EOFError:
        process.join()
        measured = False, f"its process ended with exit code {process.exitcode}", {}
    process.kill()  # it has answered, or is late
    process.join()
    return measured


def _answer(call: Callable[[], Measured], to: Connection) -> None:
    torch: Any = sys.modules.get("torch")
    try:
        to.send(call() if torch is None or not torch.cuda._is_in_bad_fork() else None)
    except Exception:  # noqa: BLE001 - whatever a case raises is its result
        to.send((False, traceback.format_exc(), {}))


def read_rows(path: Path) -> Sequence[Row]:
    """Return the rows of a file; a line that its writer did not end is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            parts: Any = json.loads(line)
        except ValueError:
            continue
        found.append(Row(**parts))
    return found
