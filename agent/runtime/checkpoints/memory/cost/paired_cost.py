"""Measures what generations cost the steps in which they are written and copied, against steps without. Pure.

Now and then all ranks leave generations out for a few steps; what lies between two such pauses is held against both, so
that what changes slowly counts for nothing. One pair says little, a dozen with their spread say enough, and three do
where copies make steps much longer."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PAUSE: Final = 6  # steps without a copy under way; what a loss in a pause costs at most, beside the usual
_FIRST: Final = 3  # generations before the first pause: memory is taken, idle spans are learned
_BLOCKS: Final = ((4, 14), (12, 40))  # up to so many pauses, steps from one to the next; early what is large is found
_LATER_BLOCK: Final = 250
_PAIRS: Final = 12
_CLIP: Final = 1.5  # of the median of its kind: what takes longer was something else
_SURE: Final = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20}
"""By pairs, standard errors for saying that it costs so much at least: Student's t, 97.5 %."""
_LIKELY: Final = 1.0  # for saying that it costs so much at most


class Pauses:
    """Asked at every boundary of steps in order. All ranks that are told the same say the same."""

    def __init__(self) -> None:
        self._past = 0  # pauses
        self._steps = self._completed = 0  # since the last
        self._clean: int | None = None  # steps of the present one; None: there is none

    def at(self, *, completed: bool, under_way: bool) -> bool:
        """Whether no generation begins here. completed: one just did. under_way: one still is."""
        self._steps += 1
        self._completed += completed
        if self._clean is None and self._due():
            self._clean = 0
        if self._clean is None or under_way:
            return self._clean is not None
        if self._clean == PAUSE:
            self._past += 1
            self._clean, self._steps, self._completed = None, 0, 0
            return False
        self._clean += 1
        return True

    def _due(self) -> bool:
        if self._past == 0:
            return self._completed >= _FIRST
        length = next((steps for most, steps in _BLOCKS if self._past < most), _LATER_BLOCK)
        return self._completed >= 1 and self._steps >= length


@dataclass(frozen=True, slots=True)
class GenerationCost:
    """Of one generation, in seconds by which it makes training longer."""

    least_s: float
    most_s: float


class Pairs:
    """Told of each step in order."""

    def __init__(self) -> None:
        self._costs_s: deque[float] = deque(maxlen=_PAIRS)
        self._before_s: Sequence[float] = ()  # the pause before the block
        self._block_s: list[float] = []
        self._begun = 0  # generations in the block
        self._clean_s: list[float] = []  # steps since the last that had a generation under way

    def stepped(self, took_s: float, *, busy: bool, begun: bool) -> None:
        """A step that is over. busy: a generation was under way. begun: it began with the step."""
        if not busy:
            self._clean_s.append(took_s)
            if len(self._clean_s) == PAUSE and self._block_s:
                self._compare()
            del self._clean_s[:-PAUSE]
            return
        if self._block_s:
            self._block_s += self._clean_s  # too short for a pause: it belongs to the block
        else:
            self._before_s = self._clean_s
        self._clean_s = []
        self._block_s.append(took_s)
        self._begun += begun

    @property
    def cost(self) -> GenerationCost | None:
        """None while too little is known."""
        sure = _SURE.get(len(self._costs_s))
        if sure is None:
            return None
        mean_s, error_s = statistics.fmean(self._costs_s), statistics.stdev(self._costs_s) / len(self._costs_s) ** 0.5
        return GenerationCost(max(mean_s - sure * error_s, 0.0), max(mean_s + _LIKELY * error_s, 0.0))

    def _compare(self) -> None:
        """The block with the pauses on both of its sides."""
        block_s, begun, self._block_s, self._begun = self._block_s, self._begun, [], 0
        if len(self._before_s) == PAUSE and begun:
            longer_s = _mean_s(block_s) - _mean_s([*self._before_s, *self._clean_s])
            self._costs_s.append(longer_s * len(block_s) / begun)


def _mean_s(took_s: Sequence[float]) -> float:
    most_s = _CLIP * statistics.median(took_s)
    return statistics.fmean(min(one, most_s) for one in took_s)
