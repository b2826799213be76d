"""Centre, spread and change of noisy measurements: what the estimators have in common.

Sources: Huber, Robust Statistics, 1981, for the median, its absolute deviation and the clipped mean; Page, Continuous
Inspection Schemes, 1954, for the cumulative sums that tell a lasting change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

_DRIFT: Final = 0.03
_DECISION: Final = 0.30
_CLIP: Final = 0.12
"""Clip of the deviation's logarithm: a lasting change by more than 12 % is detected after four steps, one by 5 %
after fifteen, and three outliers in a row, however large, never."""


def spread(values: Sequence[float], centre: float) -> float:
    """Standard deviation from the median of absolute deviations, as of normal noise; 0 for a single value."""
    count = len(values)
    if count < 2:
        return 0.0
    # The last factor makes up for the few values: without it, three of them seem a quarter less spread than they are.
    return 1.4826 * median([abs(value - centre) for value in values]) * count / (count - 0.8)


def median_error(deviation: float, count: int) -> float:
    """Standard error of the median of `count` values with this standard deviation."""
    return 1.2533 * deviation / math.sqrt(count)


class ChangeDetector:
    """Tells a lasting change of level from noise: cumulative sums of log(measured / expected), each clipped."""

    __slots__ = ("_down", "_down_since", "_up", "_up_since")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._up = self._down = 0.0
        self._up_since = self._down_since = 0

    @property
    def suspicious(self) -> bool:
        return self._up > 0 or self._down > 0

    def suspects_from(self, step: int) -> int:
        """The step with which a change may have begun; `step` while nothing speaks for one."""
        if not self.suspicious:
            return step
        return self._up_since if self._up > self._down else self._down_since

    def observe(self, step: int, deviation: float, noise: float, doubt: float) -> bool:
        """Return True if the level has changed for good; `suspects_from` then returns since when.

        deviation: log(measured / expected) of this step. noise: its standard deviation while nothing changes. doubt:
        standard error of what was expected, by which all steps are off together.
        """
        drift = max(_DRIFT, 0.75 * noise) + doubt
        clip = max(_CLIP, 3 * noise)
        deviation = min(max(deviation, -clip), clip)
        if self._up == 0:
            self._up_since = step
        if self._down == 0:
            self._down_since = step
        self._up = max(self._up + deviation - drift, 0.0)
        self._down = max(self._down - deviation - drift, 0.0)
        return max(self._up, self._down) > max(_DECISION, 7 * noise)


class ClippedMean:
    """Mean that forgets, about ten values back, and that no single value moves by more than a quarter of the spread."""

    __slots__ = ("_count", "_variance", "mean")

    GAIN: Final = 0.1
    _CLIP: Final = 2.5

    def __init__(self) -> None:
        self.mean = 0.0
        self._variance = 0.0
        self._count = 0

    def observe(self, value: float) -> None:
        self._count += 1
        gain = max(1 / self._count, self.GAIN)
        residual = value - self.mean
        if self._count * self.GAIN > 1:
            # The floor lets a mean of values that were all equal move at all.
            limit = self._CLIP * max(math.sqrt(self._variance), 0.01 * abs(self.mean))
            residual = min(max(residual, -limit), limit)
        self.mean += gain * residual
        self._variance = (1 - gain) * (self._variance + gain * residual * residual)

    def variance_of_mean(self) -> float:
        """Infinite before the second value."""
        if self._count < 2:
            return math.inf
        gain = max(1 / self._count, self.GAIN)
        return max(self._variance, (0.01 * self.mean) ** 2) * gain / (2 - gain)
