"""Learns how long a client takes for its tasks: its share of the work, and when it counts as gone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

FIRST_S: Final = 10.0  # a deadline, where nothing was learned
LEAST_S: Final = 0.25  # shorter ones meet a busy machine's pauses
_GAIN, _SPREADS = 0.25, 4.0  # RFC 6298, with a quicker mean: tasks are fewer than segments


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Smoothed times of a client's tasks: seconds, their variation, samples. seconds 0: no answer yet."""

    seconds: float = 0.0
    spread_s: float = 0.0
    samples: float = 0.0

    @property
    def rate(self) -> float | None:
        """Samples a second. Of means, so that small tasks, which are mostly overhead, count little."""
        return self.samples / self.seconds if self.seconds else None

    def learned(self, seconds: float, samples: int) -> AnswerTimes:
        """Return the times after one more answer. seconds: in which the client had nothing else to do."""
        took_s = max(seconds, 1e-9)
        if not self.seconds:
            return AnswerTimes(took_s, took_s / 2, float(samples))
        spread_s = self.spread_s + _GAIN * (abs(took_s - self.seconds) - self.spread_s)
        return AnswerTimes(
            self.seconds + _GAIN * (took_s - self.seconds), spread_s, self.samples + _GAIN * (samples - self.samples)
        )

    def usual_s(self, samples: int) -> float:
        """Return the usual time for so many samples; infinite before the first answer."""
        if not self.seconds:
            return math.inf
        return max(LEAST_S / 2, (self.seconds + self.spread_s) * max(1.0, samples / self.samples))

    def wait_s(self, samples: int) -> float:
        """Return how long to wait for a task of so many samples."""
        if not self.seconds:
            return FIRST_S
        return max(LEAST_S, (self.seconds + _SPREADS * self.spread_s) * max(1.0, samples / self.samples))
