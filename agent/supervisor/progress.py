"""Detection of dead workers by their messages and process states, and of hung ones by the steps and saved bytes that
the link's thread reports twice a second. Pure, but for the one function that reads /proc.

That thread outlives a script that hangs: its messages do not show that a loader waits for itself forever."""

from __future__ import annotations

import math
import statistics
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


MIN_SILENCE_S: Final = 30.0
MAX_SILENCE_IN_LONGEST_STEPS: Final = 3.0
"""Silence worth a warning: longer than MIN_SILENCE_S, and than this multiple of the longest step so far. Evaluations
between steps count as part of a step."""
WAITING_RANK_FACTOR: Final = 2.0
"""Factor on the limits of a rank that waits for others, so that the rank they wait for is reported or stopped first."""
GRACE_AFTER_WAIT_S: Final = 10.0
"""Seconds for which a worker that stopped waiting for others is not stopped: its peer may be the one that hung."""
FIRST_STEP_S: Final = 300.0
"""Least limit until the first completed step, in seconds: the worker loads, compiles and meets its peers."""
SAVE_STALL_S: Final = 10.0
"""Seconds without a saved byte after which a checkpoint counts as stuck: a disk takes pieces of 64 MiB faster."""
_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Progress:
    hang_s: float = 0.0
    """Limit for one step, in seconds; a worker that exceeds it is stopped. FIRST_STEP_S at least before the first step.
    0: only a warning."""
    step: int = 0
    since_s: float | None = None
    """Time at which it reached this step; None before Hello."""
    steps_s: tuple[float, ...] = ()
    """Durations of its last steps; empty before the first."""
    longest_s: float = 0.0
    """Longest of all its steps and pauses between two."""
    waits: bool = False
    """True if it waited for other ranks at the last report."""
    waited_until_s: float = -math.inf
    """Time at which it last stopped waiting for other ranks."""
    notified: bool = False
    saving: bool = False
    saved_bytes: int = 0
    saved_at_s: float = -math.inf
    """Time at which saving began, or bytes of a checkpoint or of state between ranks last moved."""

    def greeted(self, now_s: float) -> Progress:
        return self if self.since_s is not None else replace(self, since_s=now_s)

    def at(self, step: int, now_s: float, *, waits: bool = False) -> Progress:
        """Record a report of `step` completed steps, and whether the worker waits for others."""
        if step == self.step:
            if waits == self.waits:
                return self
            return replace(self, waits=waits, waited_until_s=self.waited_until_s if waits else now_s)
        took_s, longest_s = self.steps_s, self.longest_s
        if self.since_s is not None and 0 < self.step < step:
            took_s = (*took_s, (now_s - self.since_s) / (step - self.step))[-_KEPT:]
            longest_s = max(longest_s, took_s[-1])
        return replace(self, step=step, since_s=now_s, steps_s=took_s, longest_s=longest_s, notified=False, waits=waits)

    def saved(self, saving: bool, saved_bytes: int, now_s: float) -> Progress:
        """Record whether it writes a checkpoint, and the bytes of state moved to there or to other ranks."""
        moved = saved_bytes != self.saved_bytes or (saving and not self.saving)
        at_s = now_s if moved else self.saved_at_s
        return replace(self, saving=saving, saved_bytes=saved_bytes, saved_at_s=at_s)

    def saves(self, now_s: float) -> bool:
        """Return True if it writes a checkpoint whose bytes have moved recently."""
        return self.saving and now_s - self.saved_at_s <= SAVE_STALL_S

    def paused(self, for_s: float) -> Progress:
        """Leave out a time in which the agent could not look."""
        since_s = None if self.since_s is None else self.since_s + for_s
        return replace(self, since_s=since_s, saved_at_s=self.saved_at_s + for_s)

    def hung(self, now_s: float, *, trained: bool = False) -> str | None:
        """Return why to stop the worker, or None. trained: it has no more steps to do and must end."""
        if not self.hang_s or self.since_s is None or now_s - self.waited_until_s <= GRACE_AFTER_WAIT_S:
            return None
        limit_s = self.hang_s if self.steps_s or trained else max(self.hang_s, FIRST_STEP_S)
        if (silent_s := self._silent_s(now_s)) <= self._patient(limit_s):
            return None
        what = "no end" if trained else "no step"
        return f"{what} for {silent_s:.0f} s after step {self.step} (hang_s = {self.hang_s:g})"

    def _patient(self, seconds: float) -> float:
        return WAITING_RANK_FACTOR * seconds if self.waits else seconds

    def _silent_s(self, now_s: float) -> float:
        assert self.since_s is not None
        return now_s - max(self.since_s, self.saved_at_s)

    def stall_warning(self, now_s: float) -> str | None:
        """Return a warning for the user, once for each silence, or None."""
        if self.notified or self.since_s is None:
            return None
        silent_s = self._silent_s(now_s)
        if not self.steps_s:
            return self._slow_start(silent_s)
        usual_s = statistics.median(self.steps_s)
        if silent_s <= self._patient(max(MIN_SILENCE_S, MAX_SILENCE_IN_LONGEST_STEPS * self.longest_s)):
            return None
        said = (
            f"no step for {silent_s:.0f} s after step {self.step}; one took {usual_s:.2g} s before, "
            f"{self.longest_s:.2g} s at most."
        )
        if self.waits:
            return (
                f"{said} It waits for other ranks, and so do they: look at what their links carry (atoll status), or "
                "at the stacks of their scripts"
            )
        return (
            f"{said} It waits for no other rank. An evaluation or a slow disk may take that long; a script that hangs "
            "stays so: look at its stack, or cancel the job. With hang_s in the job file it is stopped and tried again"
        )

    def _slow_start(self, silent_s: float) -> str | None:
        """Report a worker that completes no first step."""
        if silent_s <= self._patient(FIRST_STEP_S):
            return None
        said = f"no step for {silent_s:.0f} s since it began, at step {self.step}."
        if self.waits:
            return f"{said} It waits for other ranks, and so do they: look at what their links carry (atoll status)"
        return (
            f"{said} It waits for no other rank: it prepares data, loads its first batch or compiles, or it hangs. "
            "Look at its output (atoll logs) and its stack. With hang_s in the job file it is stopped and tried again"
        )
