"""A disk that takes its time for each piece of a checkpoint, on command: who saves can be struck while it does."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

SLOW_DISK: Final = "slow-disk"
"""A file of this name in the folder of the evidence: seconds for each piece."""
_BEING_WRITTEN: Final = ".writing-"
"""In the name of a checkpoint's folder until it is whole, before its writer's pid."""
_write = os.write


def install(out: Path) -> None:
    """From now on this process writes checkpoints at the pace that the file says, while there is one."""
    pace = out / SLOW_DISK

    def paced(file: int, data: Any) -> int:
        if _BEING_WRITTEN in os.readlink(f"/proc/self/fd/{file}"):
            with suppress(FileNotFoundError, ValueError):  # there is none, or it is just being made
                time.sleep(float(pace.read_text()))
        return _write(file, data)

    os.write = paced


def writers(jobs: Path) -> set[int]:
    """Pids in the names of all checkpoints under `jobs` that are being written, or were when their writers died."""
    found = set()
    for folder in jobs.rglob(f"{_BEING_WRITTEN}*"):
        parts = folder.name.rsplit("-", 2)
        if len(parts) == 3 and parts[1].isdigit():
            found.add(int(parts[1]))
    return found
