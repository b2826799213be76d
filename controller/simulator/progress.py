"""A stretch of training between two failures: which steps it made and which checkpoints were complete at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Writing:
    """One tier. every: steps between checkpoints. pause_s: training stands still. write_s: from then on until the
    checkpoint counts, beside training; at most as long as `every` steps take."""

    every: int
    pause_s: float
    write_s: float

    @classmethod
    def at_most_every(cls, steps: int, pause_s: float, write_s: float, step_s: float) -> Writing:
        """As often as asked, or as it can: one checkpoint is complete before the next begins (Gemini, Eq. 6.2)."""
        return cls(max(steps, math.ceil(round(write_s / step_s, 9)), 1), pause_s, write_s)


@dataclass(frozen=True, slots=True)
class Restorable:
    """A step whose state can be restored, and when training had it."""

    step: int
    had_s: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was when training stopped. step: the last that was complete. None where no checkpoint of this stretch is."""

    step: int
    memory: Restorable | None
    persistent: Restorable | None


@dataclass(frozen=True, slots=True)
class Pace:
    """How training goes on while nothing fails. memory: None where there is no such tier."""

    step_s: float
    memory: Writing | None
    persistent: Writing

    def train(self, start_s: float, start_step: int, end_s: float) -> Stretch:
        """From a restored step until a failure.

        Steps end at equal distances, but for the pause after every one that is written to the persistent tier; so only
        the stretches between those pauses are walked through, not the steps.
        """
        now_s, step = start_s, start_step
        in_memory = stored = None
        while True:
            until_pause = self.persistent.every - step % self.persistent.every
            done = min(int((end_s - now_s) / self.step_s), until_pause)
            in_memory = self._newest(Restorable(step, now_s), done, end_s) or in_memory
            now_s, step = now_s + done * self.step_s, step + done
            if done < until_pause:
                return Stretch(step, in_memory, stored)
            if now_s + self.persistent.pause_s + self.persistent.write_s <= end_s:
                stored = Restorable(step, now_s)
            now_s += self.persistent.pause_s
            if now_s >= end_s:
                return Stretch(step, in_memory, stored)

    def _newest(self, start: Restorable, done: int, end_s: float) -> Restorable | None:
        """The newest of the `done` steps after the start whose checkpoint in memory is complete at the end."""
        if self.memory is None:
            return None
        complete = min(done, int((end_s - start.had_s - self.memory.write_s) / self.step_s))
        newest = (start.step + complete) // self.memory.every * self.memory.every
        if newest <= start.step:
            return None
        return Restorable(newest, start.had_s + (newest - start.step) * self.step_s)
