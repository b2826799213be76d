"""Compare all islands together with all but the one whose link is thinnest.

All islands send as much as the thinnest link carries. If it carries a tenth of the others, every island learns late of
every other. Without it the others share the same batch, so a step computes longer,

    T = max(B / sum_i (b_i / c_i), bytes(d) / bandwidth),

and sends a larger share d of the model, as planner `exchange-density` chooses for the remaining links. The progress of
one step of density 0.2 takes `steps_for_one_at(d)` steps of T seconds each, with the island and without it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from atoll.controller.planners.islands.exchange_density import (
    ExchangeDensityInput,
    plan_exchange_density,
    steps_for_one_at,
)
from atoll.controller.planners.islands.one_island import MIN_SAVING, IslandTimes
from atoll.planning.schemas import MAX_NODES, Schema, Share, Uncertainty


class ThinIslandInput(Schema):
    """exchange: of all islands, its bandwidths in their order. uncertainty: of the computing times. cost: of leaving an
    island out, as a part of the time within which that must pay."""

    islands: Annotated[tuple[IslandTimes, ...], Field(min_length=3, max_length=MAX_NODES)]
    exchange: ExchangeDensityInput
    uncertainty: Uncertainty = 0.0
    cost: Share = 0.0

    @model_validator(mode="after")
    def _has_a_link_each(self) -> Self:
        if len(self.exchange.bandwidths) != len(self.islands):
            raise ValueError(
                f"{len(self.islands)} islands, but {len(self.exchange.bandwidths)} bandwidths in field 'exchange'. "
                "Give one for each island"
            )
        return self


@dataclass(frozen=True, slots=True)
class ThinIslandPlan:
    """together_s, without_s: seconds for the progress of one step of density 0.2, of all islands and of all but
    `island`. density, density_without: the share of the model that is sent then. leaves: without it is sooner by
    MIN_SAVING, the cost and the uncertainty."""

    island: str
    together_s: float
    without_s: float
    density: float
    density_without: float
    leaves: bool


def compare_thin_island(given: ThinIslandInput) -> ThinIslandPlan:
    """Compare all islands with all but the thinnest. Ties among links go to the island that computes least."""
    links = given.exchange.bandwidths
    thin = min(range(len(links)), key=lambda i: (links[i], given.islands[i].batch / given.islands[i].compute_s))
    everybody = range(len(links))
    together_s, density = _taught_s(given, everybody)
    without_s, density_without = _taught_s(given, [i for i in everybody if i != thin])
    margin = (1 - MIN_SAVING) * (1 - given.cost)
    leaves = without_s * (1 + 2 * given.uncertainty) <= together_s * margin
    return ThinIslandPlan(given.islands[thin].name, together_s, without_s, density, density_without, leaves)


def _taught_s(given: ThinIslandInput, kept: range | list[int]) -> tuple[float, float]:
    """Return the seconds as above with the islands that are kept, and the density that is planned for them."""
    batch = sum(one.batch for one in given.islands)
    compute_s = batch / math.fsum(given.islands[i].batch / given.islands[i].compute_s for i in kept)
    links = tuple(given.exchange.bandwidths[i] for i in kept)
    asked = given.exchange.model_copy(update={"bandwidths": links, "step_s": compute_s})
    planned = plan_exchange_density(asked)
    shared = planned.density * asked.every / planned.every
    return steps_for_one_at(shared) * max(compute_s, planned.link_s), shared
