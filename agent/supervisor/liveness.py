"""Detection of a dead worker by its messages and its process state. Pure, but for the one function that reads /proc."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

STOPPED_S: Final = 1.5
"""A process that the kernel shows as stopped (state T) for longer counts as dead. A debugger's stop (t) does not."""
STALL_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Life:
    stall_timeout_s: float = STALL_TIMEOUT_S
    heard_at_s: float | None = None
    """Time of the last Hello or Alive; None before Hello: a script that never sends it is not expected to send Alive.
    """
    stopped_at_s: float | None = None

    def heard(self, now_s: float) -> Life:
        return replace(self, heard_at_s=now_s)

    def seen(self, now_s: float, stopped: bool, paused_s: float) -> Life:
        """Record a look at the process. paused_s: time in which the agent did not look, which does not count."""
        since_s = self.stopped_at_s if self.stopped_at_s is not None and paused_s == 0 else now_s
        heard_at_s = None if self.heard_at_s is None else min(now_s, self.heard_at_s + paused_s)
        return replace(self, stopped_at_s=since_s if stopped else None, heard_at_s=heard_at_s)

    def verdict(self, now_s: float) -> str | None:
        """Return why the worker counts as dead, or None."""
        if self.stopped_at_s is not None and now_s - self.stopped_at_s > STOPPED_S:
            return f"its process was stopped (SIGSTOP) for {now_s - self.stopped_at_s:.1f} s"
        if self.heard_at_s is not None and now_s - self.heard_at_s > self.stall_timeout_s:
            silent_s = now_s - self.heard_at_s
            return f"no sign of life for {silent_s:.1f} s (stall_timeout_s = {self.stall_timeout_s:g})"
        return None


def is_stopped(pid: int) -> bool:
    """Return True if the kernel shows the process as stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(b")") + 2 :].startswith(b"T")
