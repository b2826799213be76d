"""What generations cost the steps in which they are written and copied, measured against steps without. Pure.

Now and then all ranks leave generations out for a few steps; such a pause is held against what lies before and after
it, so that what changes slowly counts for nothing. One pair says little, a dozen with their spread say enough."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

PAUSE: Final = 6  # steps; what a loss in a pause costs at most, beside the usual
_WARM: Final = 24  # steps before the first block: memory is taken, idle spans are learned
_BLOCK: Final = 40  # steps from one pause to the next while little is known
_LATER_BLOCK: Final = 250
_KEPT: Final = 12  # pairs
_ENOUGH: Final = 6
_CLIP: Final = 1.5  # of a block's median: what takes longer was something else
_SURE: Final = 2.5  # standard errors, for saying that it costs so much at least
_LIKELY: Final = 1.0  # for saying that it costs so much at most


def paused(steps: int) -> bool:
    """Whether no generation begins at this boundary, `steps` after the first. The same on all ranks."""
    early = steps - _WARM
    if early < _KEPT * _BLOCK:
        return early >= 0 and early % _BLOCK >= _BLOCK - PAUSE
    return (early - _KEPT * _BLOCK) % _LATER_BLOCK >= _LATER_BLOCK - PAUSE


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one generation, in seconds by which it makes training longer."""

    least_s: float
    most_s: float


@dataclass(slots=True)
class _Block:
    took_s: list[float] = field(default_factory=list)
    begun: int = 0  # generations

    def mean_s(self) -> float:
        most_s = _CLIP * statistics.median(self.took_s)
        return statistics.fmean(min(one, most_s) for one in self.took_s)


class Pairs:
    """Told of each step in order."""

    def __init__(self) -> None:
        self._costs_s: deque[float] = deque(maxlen=_KEPT)
        self._before: _Block | None = None
        self._pause: _Block | None = None  # the newest; None: it was not whole
        self._now = _Block()
        self._in_pause = False

    def stepped(self, took_s: float, *, pause: bool, begun: bool, copying: bool) -> None:
        """A step that is over. pause: it lay in one. begun: a generation began with it. copying: one was under way."""
        if pause != self._in_pause:
            self._turn(pause)
        if not pause or not copying:
            self._now.took_s.append(took_s)
            self._now.begun += begun

    @property
    def cost(self) -> Cost | None:
        """None while too little is known."""
        if len(self._costs_s) < _ENOUGH:
            return None
        mean_s, error_s = statistics.fmean(self._costs_s), statistics.stdev(self._costs_s) / len(self._costs_s) ** 0.5
        return Cost(max(mean_s - _SURE * error_s, 0.0), max(mean_s + _LIKELY * error_s, 0.0))

    def _turn(self, pause: bool) -> None:
        self._in_pause = pause
        ended, self._now = self._now, _Block()
        if not pause:
            self._pause = ended if ended.took_s else None
            return
        if not ended.begun:
            self._before = None  # nothing was written: tells nothing
            return
        before, self._before = self._before, ended
        if before is not None and self._pause is not None:
            both = _Block([*before.took_s[-_BLOCK:], *ended.took_s[:_BLOCK]])
            longer_s = both.mean_s() - self._pause.mean_s()
            steps, begun = len(before.took_s) + len(ended.took_s), before.begun + ended.begun
            self._costs_s.append(longer_s * steps / begun)
