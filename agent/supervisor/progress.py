"""Judges whether a worker still gets anywhere, by the steps and the saved bytes that its link's thread reports twice a
second. Pure.

That thread lives on when the script does not: signs of life say nothing of a loader that waits for itself for ever."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Final

LEAST_S: Final = 30.0
LONGEST: Final = 3.0
"""No silence is worth a word that is shorter than LEAST_S, or than so many times the longest so far, evaluations
between two steps among them."""
WAITERS: Final = 2.0
"""Who waits for others is the last to be told of or stopped: after so many times as long, if nobody else was."""
AFTER_WAIT_S: Final = 10.0
"""A worker that has just stopped waiting for others is not stopped for so long. Its peer may be the one that hung."""
STARTS_S: Final = 300.0
"""Until its first whole step it loads, compiles and meets the others: no user's limit of a step is of that."""
STILL_S: Final = 10.0
"""A checkpoint of which no byte moves for so long gets nowhere: a disk takes its pieces of 64 MiB in less."""
_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Progress:
    hang_s: float = 0.0
    """A worker that completes no step for longer is stopped, STARTS_S at least where it has completed none; 0: it is
    only told of."""
    step: int = 0
    since_s: float | None = None
    """When it came to this step; None before it said Hello."""
    steps_s: tuple[float, ...] = ()
    """What its last steps took; empty before the first."""
    longest_s: float = 0.0
    """Of all its steps, and what the script did between two."""
    waits: bool = False
    """For other ranks, when it was last heard of."""
    waited_until_s: float = -math.inf
    """Time at which it last stopped waiting for other ranks."""
    notified: bool = False
    saving: bool = False
    saved_bytes: int = 0
    saved_at_s: float = -math.inf
    """When it began to save, or bytes of a checkpoint last moved, or of state between ranks."""

    def greeted(self, now_s: float) -> Progress:
        return self if self.since_s is not None else replace(self, since_s=now_s)

    def at(self, step: int, now_s: float, *, waits: bool = False) -> Progress:
        """It said that it has completed `step` steps, and whether it waits for others."""
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
        """It said whether it writes a checkpoint, and how much of its state has moved, to there or to other ranks."""
        moved = saved_bytes != self.saved_bytes or (saving and not self.saving)
        at_s = now_s if moved else self.saved_at_s
        return replace(self, saving=saving, saved_bytes=saved_bytes, saved_at_s=at_s)

    def saves(self, now_s: float) -> bool:
        """Whether it writes a checkpoint, and bytes of it have moved of late."""
        return self.saving and now_s - self.saved_at_s <= STILL_S

    def paused(self, for_s: float) -> Progress:
        """Nobody could look for so long, which is held against nobody."""
        since_s = None if self.since_s is None else self.since_s + for_s
        return replace(self, since_s=since_s, saved_at_s=self.saved_at_s + for_s)

    def hung(self, now_s: float, *, trained: bool = False) -> str | None:
        """Why it is to be stopped, or None. trained: it has no more steps to do, but to end."""
        if not self.hang_s or self.since_s is None or now_s - self.waited_until_s <= AFTER_WAIT_S:
            return None
        limit_s = self.hang_s if self.steps_s or trained else max(self.hang_s, STARTS_S)
        if (silent_s := self._silent_s(now_s)) <= self._patient(limit_s):
            return None
        what = "no end" if trained else "no step"
        return f"{what} for {silent_s:.0f} s after step {self.step} (hang_s = {self.hang_s:g})"

    def _patient(self, seconds: float) -> float:
        return WAITERS * seconds if self.waits else seconds

    def _silent_s(self, now_s: float) -> float:
        assert self.since_s is not None
        return now_s - max(self.since_s, self.saved_at_s)

    def suspicion(self, now_s: float) -> str | None:
        """What people should know, once for each silence, or None."""
        if self.notified or self.since_s is None:
            return None
        silent_s = self._silent_s(now_s)
        if not self.steps_s:
            return self._slow_start(silent_s)
        usual_s = statistics.median(self.steps_s)
        if silent_s <= self._patient(max(LEAST_S, LONGEST * self.longest_s)):
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
        if silent_s <= self._patient(STARTS_S):
            return None
        said = f"no step for {silent_s:.0f} s since it began, at step {self.step}."
        if self.waits:
            return f"{said} It waits for other ranks, and so do they: look at what their links carry (atoll status)"
        return (
            f"{said} It waits for no other rank: it prepares data, loads its first batch or compiles, or it hangs. "
            "Look at its output (atoll logs) and its stack. With hang_s in the job file it is stopped and tried again"
        )
