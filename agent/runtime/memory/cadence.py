"""How often a generation is written: every step, or as seldom as keeps its cost at one percent of training. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

SHARE: Final = 0.01
"""Of the time of training that writing may cost."""
_KEPT: Final = 16
_FIRST: Final = 3  # generations that take memory for the first time, and steps that warm up
OFF: Final = 2**40
"""Instead of a number of steps: this rank cannot write."""


class Cadence:
    """`every` is what this rank wishes; the longest of all ranks' holds."""

    def __init__(self) -> None:
        self._costs_s: deque[float] = deque(maxlen=_KEPT)
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._seen = 0
        self.every = 1

    def wrote(self, cost_s: float) -> None:
        """What one generation cost the training: time it was held up, and of the processor where that trains."""
        self._seen += 1
        if self._seen > _FIRST:
            self._costs_s.append(cost_s)
            self._judge()

    def stepped(self, step_s: float) -> None:
        self._steps_s.append(step_s)

    @property
    def cost_s(self) -> float:
        return statistics.median(self._costs_s) if self._costs_s else 0.0

    @property
    def step_s(self) -> float:
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def _judge(self) -> None:
        """Twice as seldom at once, more often only where it is clearly possible, so that it does not swing."""
        if len(self._costs_s) < _KEPT // 4 or self.step_s <= 0:
            return
        needed = max(1, math.ceil(self.cost_s / (SHARE * self.step_s)))
        if needed > self.every or needed <= 0.7 * self.every:
            self.every = min(needed, OFF - 1)
