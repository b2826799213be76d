"""Compares all islands together with one of them alone, training the same total batch with all the data.

A step of all together ends when the slowest island has computed its part of the batch and what has to be exchanged is
there. An exchange may run beside the share h of the computing:

    T = max(max_i c_i, (1 - h) max_i c_i + bytes / bandwidth)

unless it was measured. Island i alone computes the whole batch B at the rate of its own part b_i, without exchange:

    A_i = B c_i / b_i + o

with o for what a step takes beside. That takes no more memory than its part does (the gradients of B / b_i parts are
added up), and is the longest it can be: what a step costs whatever its batch is counts once a part. A step of one
island is exact, so as good as one of `dense`. Where islands learn late of each other, as far takes `steps` steps:
together steps * T seconds, alone A_i."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from atoll.controller.planners.schemas import (
    MAX_NODES,
    BytesPerSecond,
    Name,
    Schema,
    Seconds,
    Share,
    TotalBatch,
    Uncertainty,
)

CLEARLY: Final = 0.1
"""Of its time, that one island has to save before it is called sooner."""

StepSeconds = Annotated[float, Field(gt=0, le=1e6)]


class IslandTimes(Schema):
    """batch: its part of the total batch. compute_s: in which its devices compute that together, without waiting."""

    name: Name
    batch: TotalBatch
    compute_s: StepSeconds


class Exchange(Schema):
    """What the busiest link of an island carries in a step: bytes each way, bytes a second. hidden: the share of a
    step's computing beside which that may happen; 1 where what others sent may come a step late."""

    bytes: Annotated[int | float, Field(ge=0, le=2**60)]
    bandwidth: BytesPerSecond
    hidden: Share


class OneIslandInput(Schema):
    """step_s: of all together, as measured; where it is given, `exchange` need not be. steps: of the strategy, for one
    of `dense`. beside_s: of a step of one island, without computing. uncertainty: of the computing times."""

    islands: Annotated[tuple[IslandTimes, ...], Field(min_length=2, max_length=MAX_NODES)]
    exchange: Exchange | None = None
    step_s: StepSeconds | None = None
    steps: Annotated[int | float, Field(ge=1, le=1e6)] = 1
    beside_s: Seconds = 0.0
    uncertainty: Uncertainty = 0.0

    @model_validator(mode="after")
    def _knows_a_step(self) -> Self:
        if self.exchange is None and self.step_s is None:
            raise ValueError("field 'exchange' is missing. Say what a step exchanges, or its step_s as measured")
        return self

    def alone_s(self, island: IslandTimes) -> float:
        """Seconds that the island takes for a step of the whole batch."""
        return sum(one.batch for one in self.islands) * island.compute_s / island.batch + self.beside_s


@dataclass(frozen=True, slots=True)
class OneIslandPlan:
    """together_s, alone_s: seconds for what a step of `dense` achieves, of all islands, and of `island`, which is the
    soonest alone. sooner: whether it is so by CLEARLY and what is unsure."""

    together_s: float
    alone_s: float
    island: str
    sooner: bool


def compare_one_island(given: OneIslandInput) -> OneIslandPlan:
    """Ties among islands go to the first."""
    best = min(given.islands, key=lambda one: one.compute_s / one.batch)
    alone_s = given.alone_s(best)
    together_s = given.steps * _step_s(given)
    sooner = alone_s * (1 + 2 * given.uncertainty) <= together_s * (1 - CLEARLY)
    return OneIslandPlan(together_s, alone_s, best.name, sooner)


def _step_s(given: OneIslandInput) -> float:
    if given.step_s is not None:
        return given.step_s
    assert given.exchange is not None
    compute_s = max(one.compute_s for one in given.islands)
    link_s = given.exchange.bytes / given.exchange.bandwidth
    return max(compute_s, (1 - given.exchange.hidden) * compute_s + link_s)
