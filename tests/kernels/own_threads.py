"""Threads of this process by the kernel's own list, which has one for a moment longer than who joined it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def native_threads(prefix: str) -> list[str]:
    """Names that begin so."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if name.startswith(prefix))


def until(holds: Callable[[], bool], deadline_s: float = 30.0) -> bool:
    """Whether it came to hold in time."""
    ends_s = time.monotonic() + deadline_s
    while not (there := holds()) and time.monotonic() < ends_s:
        time.sleep(0.001)
    return there
