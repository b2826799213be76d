"""The convergence profile of a model as a planner sees it: extra loss over compression rate and total batch.

Source: StellaTrain (Lim et al., 2024), section 4.3: g(r, X). The offline profile fits it; what is planned with is its
values on a grid, so that a recorded input is text and needs no fitted model to be derived again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Surrogate:
    """rates: ascending, 0 <= r < 1. batches: total batches, ascending, > 0. extra: a row per rate, a value > -1 per
    batch: the loss after the probe, relative to the one with neither compression nor staleness."""

    rates: tuple[float, ...]
    batches: tuple[float, ...]
    extra: tuple[tuple[float, ...], ...]

    def at(self, rate: float, batch: float) -> float:
        """Bilinear in the logarithms of the share kept and of the batch; the edge's value beyond the edges."""
        row, down = _place([-math.log1p(-r) for r in self.rates], -math.log1p(-rate))
        column, right = _place([math.log(b) for b in self.batches], math.log(batch))
        above, below = self.extra[row], self.extra[min(row + 1, len(self.rates) - 1)]
        after = min(column + 1, len(self.batches) - 1)
        upper = above[column] + right * (above[after] - above[column])
        lower = below[column] + right * (below[after] - below[column])
        return upper + down * (lower - upper)


def _place(knots: Sequence[float], value: float) -> tuple[int, float]:
    """The knot at or before `value`, and the part of the way to the next one."""
    i = bisect.bisect_right(knots, value) - 1
    if i < 0:
        return 0, 0.0
    if i >= len(knots) - 1:
        return len(knots) - 1, 0.0
    return i, (value - knots[i]) / (knots[i + 1] - knots[i])
