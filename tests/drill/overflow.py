"""Gradients that overflow on one rank at a step that is named ahead: the same in a step that is done again, and in the
run that nobody disturbs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from drill import evidence

_PLANNED: Final = "overflows"
"""A file of this name in the folder of the evidence: lines of a step and a rank."""
AHEAD_S: Final = 2.0
"""From the strike to the step: all ranks must have read of it by then."""
_TAIL_BYTES: Final = 64 << 10


def strike(out: Path, rank: int, step_s: float) -> int | None:
    """Have a rank's gradients overflow at a step AHEAD_S from now. Returns the step; None where none was trained."""
    reached = _newest_step(out)
    if reached is None:
        return None
    step = reached + round(AHEAD_S / max(step_s, 0.01))
    with (out / _PLANNED).open("a") as file:
        file.write(f"{step} {rank}\n")
    return step


def repeat(out: Path, calm: Path) -> None:
    """What was planned for the job in `out` is planned for that in `calm`."""
    if (out / _PLANNED).exists():
        shutil.copy(out / _PLANNED, calm / _PLANNED)


class Overflows:
    """Of one rank's process: what is planned for it. Read anew where the file has grown."""

    def __init__(self, out: Path) -> None:
        self._path = out / _PLANNED
        self._bytes = 0
        self._planned: frozenset[tuple[int, int]] = frozenset()

    def due(self, step: int, rank: int) -> bool:
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return False
        if size != self._bytes:
            lines = self._path.read_text().split("\n")[:-1]
            self._planned = frozenset((int(at), int(of)) for at, of in map(str.split, lines))
            self._bytes = size
        return (step, rank) in self._planned


def _newest_step(out: Path) -> int | None:
    """Of all ranks and runs: the last whole line of each file."""
    steps = []
    for path, run, rank in evidence.step_files(out):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
        if len(lines) > 1 and lines[-2].startswith(b"{"):
            steps += [one.step for one in evidence.parse(run, rank, lines[-2].decode() + "\n")]
    return max(steps, default=None)
