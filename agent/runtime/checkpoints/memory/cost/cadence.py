"""Decides how often a generation is written: as often as its cost stays within a share of training.

The budget: a generation may cost training 1 % of the steps that it is for. Its cost is accounted once, in seconds, as
the sum of three terms:

- the time for which it held up the training thread;
- the processor time of writing, sealing and copying, as far as training waited for processors (Linux's own accounts);
- the time by which exchanges of training began late, because bytes of copies were still queued on the link
  (`PathModel.queued_s`).

A generation is then due every k = cost / (1 % of a step) steps; the longest k of all ranks counts. Cost and step are
medians of the last 16, so one slow write changes nothing."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Final

MAX_COST_SHARE: Final = 0.01
"""The share of training time that generations may cost."""
MAX_STEPS_BETWEEN: Final = 2**39 - 1
"""The longest period, in steps."""
ABANDON: Final = 2**39
"""In place of a period: this rank cannot write the generation in progress, but can write later ones."""
OFF: Final = 2**40
"""In place of a period: this rank can write no generation."""

_WINDOW: Final = 16
"""Generations and steps whose median counts."""
_WARM_UP_GENERATIONS: Final = 2
"""First generations, which take new memory while steps warm up. They count by a part only."""
_WARM_UP_FACTOR: Final = 4.0
"""The most by which a first generation costs more than later ones."""
_MIN_FOR_CHEAPEST: Final = 2
"""Later generations from which the cheapest counts; before, the first ones do."""
_MIN_FOR_MEDIAN: Final = 4
"""Later generations from which the median counts."""
_MAX_GROWTH: Final = 0.7
"""A shorter period is taken up only if it is at most this share of the present one, so that it does not swing."""
_STEPS_UNTIL_NEWS: Final = 50
"""Steps for which a new period must hold before people are told."""


class CadenceNotice:
    """Decides when people are told of a new period: once it stays, and differs by a factor of two."""

    def __init__(self) -> None:
        self._announced = 1
        self._steps = 0  # for which the period has differed

    def changed(self, every: int) -> bool:
        """Return whether to tell people of the period `every` now. Call it once a step."""
        if self._announced / 2 < every < 2 * self._announced:
            self._steps = 0
            return False
        self._steps += 1
        if self._steps < _STEPS_UNTIL_NEWS:
            return False
        self._announced, self._steps = every, 0
        return True


class Cadence:
    """The period of one rank. `every`: the steps from one generation to the next that this rank can afford."""

    def __init__(self) -> None:
        self._costs_s: deque[float] = deque(maxlen=_WINDOW)
        self._steps_s: deque[float] = deque(maxlen=_WINDOW)
        self._first_s: list[float] = []
        self.every = 1

    def wrote(self, cost_s: float) -> None:
        """Account for a generation that cost training so many seconds."""
        (self._first_s if len(self._first_s) < _WARM_UP_GENERATIONS else self._costs_s).append(cost_s)
        if self.step_s <= 0:
            return
        needed = min(max(1, math.ceil(self.cost_s / (MAX_COST_SHARE * self.step_s))), MAX_STEPS_BETWEEN)
        if needed > self.every or needed <= _MAX_GROWTH * self.every:
            self.every = needed

    def stepped(self, step_s: float) -> None:
        """Account for a step."""
        self._steps_s.append(step_s)

    @property
    def cost_s(self) -> float:
        """Seconds that one generation costs training."""
        if len(self._costs_s) >= _MIN_FOR_MEDIAN:
            return statistics.median(self._costs_s)
        if len(self._costs_s) >= _MIN_FOR_CHEAPEST:
            return min(self._costs_s)
        at_least_s = min(self._first_s, default=0.0) / _WARM_UP_FACTOR
        return at_least_s if at_least_s >= self.step_s / 2 else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0


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
