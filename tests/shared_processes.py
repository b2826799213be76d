"""Processes that several tests use one after the other."""

from __future__ import annotations

from typing import Final

import psutil

PIDS: Final[set[int]] = set()
"""Whoever started these ends them, and answers for what they start."""


def is_shared(process: psutil.Process) -> bool:
    """Return whether the process, or one that it descends from, is among PIDS."""
    try:
        return any(one.pid in PIDS for one in (process, *process.parents()))
    except psutil.NoSuchProcess:
        return False
