"""How long a step took and how much of it was waiting, for the estimators."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds. step: from one boundary to the next; compute: without waiting for others and without the boundary's
    own work (checkpoints); wait: for collectives."""

    step: float
    compute: float
    wait: float


class StepClock:
    """Measures from `boundary_ends` to `boundary_begins`, and from one `boundary_begins` to the next."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._begun_s = self._working_s = now_s()
        self._wait_s = self._boundary_wait_s = 0.0

    def waited(self, seconds: float, *, at_boundary: bool = False) -> None:
        """Others kept this worker for so long. at_boundary: between `boundary_begins` and `boundary_ends`."""
        if at_boundary:
            self._boundary_wait_s += seconds
        else:
            self._wait_s += seconds

    def boundary_begins(self) -> StepTimes:
        """The step's times; the next step begins here."""
        now_s = self._now_s()
        compute_s = max(now_s - self._working_s - self._wait_s, 0.0)
        times = StepTimes(now_s - self._begun_s, compute_s, self._wait_s + self._boundary_wait_s)
        self._begun_s, self._wait_s, self._boundary_wait_s = now_s, 0.0, 0.0
        return times

    def boundary_ends(self) -> None:
        self._working_s = self._now_s()
