"""Decides how often a generation is written: as often as keeps its cost at one percent of training. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

from atoll.agent.runtime.checkpoints.memory.cost.paired_cost import GenerationCost

SHARE: Final = 0.01
"""Of the time of training that writing may cost."""
_WINDOW: Final = 16
_FIRST: Final = 2  # generations that take memory for the first time, and steps that warm up
_FIRST_TIMES: Final = 4.0  # as much as later ones they cost at most; they count where that is half a step or more
_LEAST, _ENOUGH = 2, 4  # generations to judge by: the cheapest of a few, the median of more
OFF: Final = 2**40
"""Instead of a number of steps: this rank cannot write."""
ABANDON: Final = OFF // 2
"""Instead of a number of steps: this rank cannot write the generation under way, but later ones."""


_FOR_GOOD: Final = 50  # steps


class CadenceNotice:
    """What people should be told of how often generations are written: a change that stays, by a factor of two."""

    def __init__(self) -> None:
        self._announced = 1
        self._steps = 0  # for which it has been another one

    def changed(self, every: int) -> bool:
        """Asked once a step: whether this is to be told now."""
        if self._announced / 2 < every < 2 * self._announced:
            self._steps = 0
            return False
        self._steps += 1
        if self._steps < _FOR_GOOD:
            return False
        self._announced, self._steps = every, 0
        return True


class Cadence:
    """`every` is what this rank wishes; the longest of all ranks' holds."""

    def __init__(self) -> None:
        self._costs_s: deque[float] = deque(maxlen=_WINDOW)
        self._steps_s: deque[float] = deque(maxlen=_WINDOW)
        self._first_s: list[float] = []
        self._compared: GenerationCost | None = None
        self.every = 1

    def wrote(self, cost_s: float) -> None:
        """What one generation cost the training: time it was held up, and of the processor where that trains."""
        (self._first_s if len(self._first_s) < _FIRST else self._costs_s).append(cost_s)
        self._judge()

    def stepped(self, step_s: float) -> None:
        self._steps_s.append(step_s)

    def compared(self, cost: GenerationCost | None) -> None:
        """What steps with generations take longer than steps without, for one generation, where that is known."""
        self._compared = cost

    @property
    def cost_s(self) -> float:
        """Of one generation: what is accounted for, or more where steps are longer by more for certain."""
        accounted_s = self._accounted_s()
        return max(accounted_s, self._compared.least_s) if self._compared is not None else accounted_s

    def _accounted_s(self) -> float:
        if len(self._costs_s) >= _ENOUGH:
            return statistics.median(self._costs_s)
        if len(self._costs_s) >= _LEAST:
            return min(self._costs_s)
        at_least_s = min(self._first_s, default=0.0) / _FIRST_TIMES
        return at_least_s if at_least_s >= self.step_s / 2 else 0.0

    @property
    def _most_s(self) -> float:
        return max(self.cost_s, self._compared.most_s) if self._compared is not None else self.cost_s

    @property
    def step_s(self) -> float:
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def _judge(self) -> None:
        """More seldom at once, more often only where it is clearly possible, so that it does not swing."""
        if self.step_s <= 0:
            return
        needed, enough = self._needed(self.cost_s), self._needed(self._most_s)
        if needed > self.every:
            self.every = min(needed, OFF - 1)
        elif enough <= 0.7 * self.every:
            self.every = enough

    def _needed(self, cost_s: float) -> int:
        return max(1, math.ceil(cost_s / (SHARE * self.step_s)))
