"""A disk that takes its time for each piece of a checkpoint, on command: who saves can be struck while it does."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_PACE: Final = "slow-disk"
"""A file of this name in the folder of the evidence: seconds for each piece, and the first epoch in which it holds."""
_BEING_WRITTEN: Final = ".writing-"
"""In the name of a checkpoint's folder until it is whole, before its writer's pid."""
_write = os.write


def slow(out: Path, piece_s: float, from_epoch: int = 0) -> Path:
    """Have all of the drill's workers take `piece_s` for each piece, those that train epoch `from_epoch` or a later
    one. Returns the file to remove when it shall be over."""
    pace = out / _PACE
    pace.write_text(f"{piece_s} {from_epoch}")
    return pace


class SlowDisk:
    """Of this process, which from now on writes checkpoints at the pace that `slow` commands, while it does.

    epoch: the one that is trained, to be kept up by who knows."""

    def __init__(self, out: Path) -> None:
        self.epoch = 0
        self._pace = out / _PACE
        os.write = self._paced

    def _paced(self, file: int, data: Any) -> int:
        if _BEING_WRITTEN in os.readlink(f"/proc/self/fd/{file}"):
            with suppress(FileNotFoundError, ValueError):  # there is none, or it is just being made
                piece_s, from_epoch = self._pace.read_text().split()
                if self.epoch >= int(from_epoch):
                    time.sleep(float(piece_s))
        return _write(file, data)


def writers(jobs: Path) -> set[int]:
    """Pids in the names of all checkpoints under `jobs` that are being written, or were when their writers died."""
    found = set()
    for folder in jobs.rglob(f"{_BEING_WRITTEN}*"):
        parts = folder.name.rsplit("-", 2)
        if len(parts) == 3 and parts[1].isdigit():
            found.add(int(parts[1]))
    return found
