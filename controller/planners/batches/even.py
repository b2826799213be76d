"""Split a batch evenly: the split that needs no measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from atoll.controller.planners.batches.bounds import Bounds, round_within
from atoll.errors import NoFeasiblePlan
from atoll.planning.schemas import MAX_NODES, Schema, TotalBatch


class EvenInput(Schema):
    """total_batch: samples of one step, over all nodes. nodes: their bounds, or their number if there are none."""

    total_batch: TotalBatch
    nodes: Annotated[
        Annotated[int, Field(ge=1, le=MAX_NODES), Tag("(count)")]
        | Annotated[tuple[Bounds, ...], Field(min_length=1, max_length=MAX_NODES), Tag("(each)")],
        Discriminator(lambda nodes: "(count)" if isinstance(nodes, int) else "(each)"),
    ]


@dataclass(frozen=True, slots=True)
class EvenPlan:
    """batches: samples of each node, in order; their sum is the total batch."""

    batches: tuple[int, ...]


def split_evenly(given: EvenInput) -> EvenPlan:
    """Return samples as equal as the bounds allow: a common level, cut off at each node's bounds. O(n log n).

    Raises NoFeasiblePlan if the bounds cannot hold the total batch."""
    nodes = (Bounds(),) * given.nodes if isinstance(given.nodes, int) else given.nodes
    level = _level(given.total_batch, nodes)
    wanted = [min(max(level, float(b.min_batch)), b.ceiling(given.total_batch)) for b in nodes]
    return EvenPlan(round_within(wanted, given.total_batch, nodes))


def _level(total: int, nodes: Sequence[Bounds]) -> float:
    """Return the level at which the cut-off levels sum to `total`: piecewise linear in the level, so walk its
    breakpoints."""
    low = sum(b.min_batch for b in nodes)
    high = sum(b.ceiling(total) for b in nodes)
    if not low <= total <= high:
        raise NoFeasiblePlan(f"total_batch = {total} does not fit the bounds, which allow {low} to {high:g} together")
    changes = sorted([(float(b.min_batch), 1) for b in nodes] + [(b.ceiling(total), -1) for b in nodes])
    level, rising, held = changes[0][0], 0, float(low)
    for at, change in changes:
        if rising and held + rising * (at - level) >= total:
            return level + (total - held) / rising
        held += rising * (at - level)
        level, rising = at, rising + change
    return level
