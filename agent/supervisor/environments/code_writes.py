"""Detect scripts that write beside their code: jobs share that folder, and old ones are deleted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LOOK_S: Final = 10.0
_NOT_THE_SCRIPTS: Final = frozenset({"__pycache__"})


def written_since(folder: Path, since_s: float) -> str | None:
    """Return a file below `folder` written after this wall-clock time, relative to it, or None."""
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_THE_SCRIPTS]
        for name in names:
            path = os.path.join(where, name)
            try:
                if os.lstat(path).st_mtime > since_s:
                    return os.path.relpath(path, folder)
            except OSError:
                continue  # it is gone again
    return None


def warning(written: str) -> str:
    return (
        f"the script wrote {written} beside its code. All jobs with the same code share that folder, and it is deleted "
        "when it is old. Write to an absolute path, or take the model out of a checkpoint with `atoll export`"
    )
