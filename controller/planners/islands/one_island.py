"""Compare all islands together with one of them alone, training the same total batch with all the data.

A step of all together ends when the slowest island has computed its part of the batch and the exchange has arrived. An
exchange may run beside the share h of the computing:

    T = max(max_i c_i, (1 - h) max_i c_i + bytes / bandwidth)

A measured step replaces this. Island i alone computes the whole batch B at the rate of its own part b_i, without
exchange:

    A_i = B c_i / b_i + o

with o for the rest of a step. That takes no more memory than its part does, since the gradients of B / b_i parts are
added up. It is an upper bound: the fixed cost of a step counts once a part. A step of one island is exact, so as good
as one of `dense`. If islands learn late of each other, the same progress takes `steps` steps: together steps * T
seconds, alone A_i."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from atoll.planning.schemas import (
    MAX_NODES,
    BytesPerSecond,
    Name,
    Schema,
    Seconds,
    Share,
    TotalBatch,
    Uncertainty,
)

MIN_SAVING: Final = 0.1
"""Share of its time that one island must save before it is called sooner."""

StepSeconds = Annotated[float, Field(gt=0, le=1e6)]


class IslandTimes(Schema):
    """batch: the island's part of the total batch. compute_s: seconds in which its devices compute it together, without
    waiting."""

    name: Name
    batch: TotalBatch
    compute_s: StepSeconds


class Exchange(Schema):
    """Traffic of the busiest link of an island in a step: bytes each way, bytes a second. hidden: the share of a step's
    computing beside which it may happen; 1 if others' updates may come a step late."""

    bytes: Annotated[int | float, Field(ge=0, le=2**60)]
    bandwidth: BytesPerSecond
    hidden: Share


class OneIslandInput(Schema):
    """step_s: measured seconds of a step of all together; `exchange` may be left out with it. steps: steps of the
    strategy for one of `dense`. beside_s: seconds of one island's step without computing. uncertainty: of the computing
    times."""

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
        """Return the seconds that the island takes for a step of the whole batch."""
        return sum(one.batch for one in self.islands) * island.compute_s / island.batch + self.beside_s


@dataclass(frozen=True, slots=True)
class OneIslandPlan:
    """together_s, alone_s: seconds for the progress of one step of `dense`, of all islands and of `island`, the soonest
    alone. sooner: alone is sooner by MIN_SAVING and the uncertainty."""

    together_s: float
    alone_s: float
    island: str
    sooner: bool


def compare_one_island(given: OneIslandInput) -> OneIslandPlan:
    """Compare the soonest island alone with all together. Ties among islands go to the first."""
    best = min(given.islands, key=lambda one: one.compute_s / one.batch)
    alone_s = given.alone_s(best)
    together_s = given.steps * _step_s(given)
    sooner = alone_s * (1 + 2 * given.uncertainty) <= together_s * (1 - MIN_SAVING)
    return OneIslandPlan(together_s, alone_s, best.name, sooner)


def _step_s(given: OneIslandInput) -> float:
    if given.step_s is not None:
        return given.step_s
    assert given.exchange is not None
    compute_s = max(one.compute_s for one in given.islands)
    link_s = given.exchange.bytes / given.exchange.bandwidth
    return max(compute_s, (1 - given.exchange.hidden) * compute_s + link_s)
