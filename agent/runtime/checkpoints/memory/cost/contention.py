"""Measures what background work takes from training where both need the same processors. Linux's own accounts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_TASKS: Final = Path("/proc/self/task")
_MIN_INTERVAL_S: Final = 1.0
"""Seconds between two looks at the kernel's accounts, at least."""
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
"""Seconds of one tick of the kernel's accounts."""
_IDLE, _IOWAIT = 4, 5  # fields of a processor's line


def idle_s() -> float:
    """Seconds, over all processors that this process may use, in which they had nothing to do since the boot."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    fields = (line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu"))
    return sum((int(one[_IDLE]) + int(one[_IOWAIT])) * _TICK_S for one in fields if one[0] in mine)


class ThreadTime:
    """Processor time of threads of this process that are known by name: those of libraries."""

    def __init__(self, name: str) -> None:
        """name: with which theirs begin, of at most 15 characters. They are looked for now."""
        self._paths = [task / "schedstat" for task in _TASKS.iterdir() if _read(task / "comm").startswith(name)]

    def seconds(self) -> float:
        """Return the processor time of those threads that still run, in seconds."""
        return sum(int(text.split()[0]) / 1e9 for path in self._paths if (text := _read(path)))


class Contention:
    """Share of their processor time that background threads take from training. Measured at most once a second, because
    it takes a while on large machines."""

    def __init__(self) -> None:
        self._looked_s, self._idle_s = time.monotonic(), idle_s()
        self._share = 0.0

    def share(self) -> float:
        """Lately: 0 where a whole processor had nothing to do all the time, 1 where none ever had."""
        took_s = time.monotonic() - self._looked_s
        if took_s >= _MIN_INTERVAL_S:
            idle = idle_s()
            self._share = min(1.0, max(0.0, 1.0 - (idle - self._idle_s) / took_s))
            self._looked_s, self._idle_s = self._looked_s + took_s, idle
        return self._share


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # the thread has ended
