"""Convergence profile of a model for planners: extra loss over sparsity and total batch.

Source: StellaTrain (Lim et al., 2024), section 4.3: g(r, X). The offline profile fits it. Planners take its values on
a grid, so that a recorded input is text and needs no fitted model to be derived again.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from atoll.planning.schemas import MAX_BATCH, Schema, Sparsity


def _ascending(values: tuple[float, ...]) -> tuple[float, ...]:
    if any(after <= before for before, after in itertools.pairwise(values)):
        raise ValueError("must ascend, each value once. Sort them")
    return values


_Axis = Field(min_length=1, max_length=256, strict=False)  # a list of a TOML file is as good as one of JSON
_Batch = Annotated[float, Field(ge=1, le=MAX_BATCH)]
_Extra = Annotated[float, Field(ge=-0.999, le=1e6)]
_Row = Annotated[tuple[_Extra, ...], Field(strict=False)]


class Surrogate(Schema):
    """Extra loss on a grid. sparsities, batches (total): ascending. extra: a row per sparsity, a value per batch. It is
    relative to the loss with neither compression nor staleness."""

    sparsities: Annotated[tuple[Sparsity, ...], _Axis, AfterValidator(_ascending)]
    batches: Annotated[tuple[_Batch, ...], _Axis, AfterValidator(_ascending)]
    extra: Annotated[tuple[_Row, ...], Field(strict=False)]

    @model_validator(mode="after")
    def _covers_the_grid(self) -> Surrogate:
        rows, columns = len(self.sparsities), len(self.batches)
        if len(self.extra) != rows or any(len(row) != columns for row in self.extra):
            raise ValueError(f"must have {rows} rows of {columns} in extra: one per sparsity, a value per batch")
        return self

    def at(self, sparsity: float, batch: float) -> float:
        """Interpolate bilinearly in the logarithms of density and batch; beyond the edges, return the edge's value."""
        row, down = _place([-math.log1p(-r) for r in self.sparsities], -math.log1p(-sparsity))
        column, right = _place([math.log(b) for b in self.batches], math.log(batch))
        above, below = self.extra[row], self.extra[min(row + 1, len(self.sparsities) - 1)]
        after = min(column + 1, len(self.batches) - 1)
        upper = above[column] + right * (above[after] - above[column])
        lower = below[column] + right * (below[after] - below[column])
        return upper + down * (lower - upper)


def _place(knots: Sequence[float], value: float) -> tuple[int, float]:
    """Return the knot at or before `value`, and the share of the way to the next one."""
    i = bisect.bisect_right(knots, value) - 1
    if i < 0:
        return 0, 0.0
    if i >= len(knots) - 1:
        return len(knots) - 1, 0.0
    return i, (value - knots[i]) / (knots[i + 1] - knots[i])
