"""Bandwidth traces: files of `seconds,mbit_s` lines that a link's rate follows, over and over.

traces/wan.csv stands in for the wide-area trace of the StellaTrain paper, which is not public: 50 to 600 Mbit/s, mean
about 150, ten minutes. Made by scripts/make_trace.py from a regime-switching log-normal process with a fixed seed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.controller.simulator.cluster import read_trace

WAN: Final = Path(__file__).resolve().parent.parent / "traces" / "wan.csv"

LOWEST_MBIT_S: Final = 50.0
HIGHEST_MBIT_S: Final = 600.0
# Congested, usual, quiet: median Mbit/s, and mean seconds until the next regime.
REGIMES: Final = ((75.0, 25.0), (130.0, 45.0), (300.0, 15.0))
SIGMA: Final = 0.25  # of the log-rate around its regime's median
MEMORY: Final = 0.8  # correlation of that deviation from one second to the next


@dataclass(frozen=True, slots=True)
class Trace:
    """Rates that hold from `starts_s[i]` on; after `length_s` it begins again."""

    starts_s: Sequence[float]
    mbit_s: Sequence[float]
    length_s: float

    def at(self, now_s: float) -> float:
        """Mbit/s at this many seconds after the trace began."""
        return self.mbit_s[bisect_right(self.starts_s, now_s % self.length_s) - 1]

    def next_change_s(self, now_s: float) -> float:
        """When the point after `now_s` begins, in seconds since the trace began; always later than `now_s`."""
        rounds, inside = divmod(now_s, self.length_s)
        index = bisect_right(self.starts_s, inside)
        return rounds * self.length_s + (self.starts_s[index] if index < len(self.starts_s) else self.length_s)

    def scaled(self, factor: float) -> Trace:
        """The same, with rates times this."""
        return Trace(self.starts_s, [rate * factor for rate in self.mbit_s], self.length_s)

    def mean(self, begin_s: float, end_s: float) -> float:
        """Mbit/s on average over this time."""
        megabits, now = 0.0, begin_s
        while now < end_s:
            until = min(self.next_change_s(now), end_s)
            megabits += self.at(now) * (until - now)
            now = until
        return megabits / (end_s - begin_s)


def read(path: Path) -> Trace:
    """A trace file, as the simulator reads it. Raises BadInput naming file and line."""
    link = read_trace(path, hint="")
    return Trace(link.starts_s, link.mbit_s, link.length_s)


def generate(seconds: int, seed: int) -> list[float]:
    """Mbit/s for each second: an AR(1) log-normal around the median of a regime that changes at random.

    Reproducible: `random.Random(seed)` gives the same numbers on every Python. Always in LOWEST..HIGHEST_MBIT_S."""
    draw = random.Random(seed)
    regime, deviation = 1, 0.0
    rates = []
    for _ in range(seconds):
        if draw.random() < 1 / REGIMES[regime][1]:
            regime = draw.choice([other for other in range(len(REGIMES)) if other != regime])
        deviation = MEMORY * deviation + math.sqrt(1 - MEMORY**2) * draw.gauss(0, SIGMA)
        rates.append(min(max(REGIMES[regime][0] * math.exp(deviation), LOWEST_MBIT_S), HIGHEST_MBIT_S))
    return rates
