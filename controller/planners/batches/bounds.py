"""Bound a node's batch, and round batches within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import model_validator

from atoll.errors import NoFeasiblePlan
from atoll.planning.schemas import Samples, Schema


class Bounds(Schema):
    """Smallest and, if the node has a limit, largest number of samples of a node."""

    min_batch: Samples = 0
    max_batch: Samples | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Bounds:
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(
                f"has max_batch = {self.max_batch}, less than its min_batch = {self.min_batch}. "
                "Raise one or lower the other"
            )
        return self

    def ceiling(self, total: int) -> float:
        """Return the most samples of `total` that this node may get."""
        return float(total if self.max_batch is None else self.max_batch)


def round_within(wanted: Sequence[float], total: int, bounds: Sequence[Bounds]) -> tuple[int, ...]:
    """Return whole numbers that sum to `total`, stay within `bounds` and lie within one of `wanted` (largest
    remainder).

    wanted: within bounds already, summing to `total` up to rounding errors. Ties go to the earlier node."""
    counts = [
        min(max(math.floor(w + 1e-9), b.min_batch), int(b.ceiling(total))) for w, b in zip(wanted, bounds, strict=True)
    ]
    left = total - sum(counts)
    order = sorted(range(len(counts)), key=lambda i: (counts[i] - wanted[i], i))
    while left:
        before = left
        for i in order if left > 0 else reversed(order):
            step = 1 if left > 0 else -1
            if left and bounds[i].min_batch <= counts[i] + step <= bounds[i].ceiling(total):
                counts[i] += step
                left -= step
        if left == before:
            raise NoFeasiblePlan(f"{total} samples do not fit the bounds of {len(counts)} nodes. Widen max_batch")
    return tuple(counts)
