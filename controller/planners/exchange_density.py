"""Chooses how much of its model an island sends of a step through owners: what its link carries beside it, no more than
teaches something, and no more than its devices bear, unless islands would drift apart.

An island of n sends the due share of each entry to its owner, the heaviest blocks first, and as owner of a part of the
model sends back to everybody what the masters lack:

    bytes(d) = (n - 1) / n * entries / every * (d b(d) + r b(r)),  r = min(1, returned d)

with b(d) bytes an entry, value and part of an index. As much comes as goes, whatever n is.

Drift is what the island that has most of it has not sent, in steps' worth of its own updates. It falls about as the
density grows, so measured at d it is within a bound from

    drift / bound * d

on. What an island learns is of use to others once they have it: beyond the bound a byte is worth more than the devices'
time, below it less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from atoll.controller.planners.schemas import MAX_NODES, BytesPerSecond, Schema, Seconds, Share, TotalBatch
from atoll.controller.planners.wire_bytes import BLOCK_ENTRIES, index_bytes

LEAST: Final = 0.0001
"""Of what workers take."""
_HALVINGS: Final = 40

HeldBy = Literal["links", "devices", "learning", "drift"]


class Drift(Schema):
    """steps: worth of its own updates that an island has not sent, at this density."""

    steps: Annotated[float, Field(ge=0, le=1e9)]
    density: Annotated[float, Field(ge=LEAST, le=1)]


class ExchangeDensityInput(Schema):
    """entries: of the model. every: steps between two exchanges of one. value_bytes: of one on the wire. returned: what
    an owner sends back for what an island sends. bandwidths: bytes a second of each island's link, each way. step_s: of
    the slowest device, without waiting. used: of a link's time in a step, that may be filled. exchange_s: a step takes
    so much longer on the devices with density 1 than with 0; bearable: of a step, that the exchange may take there.
    enough: the density beyond which more teaches nothing. drift: as measured; most_drift: the steps' worth of updates
    that may wait where devices would rather send less."""

    entries: TotalBatch
    bandwidths: Annotated[tuple[BytesPerSecond, ...], Field(min_length=2, max_length=MAX_NODES)]
    step_s: Annotated[float, Field(gt=0, le=1e6)]
    value_bytes: Annotated[int | float, Field(gt=0, le=8)]
    enough: Annotated[float, Field(ge=LEAST, le=1)]
    every: Annotated[int, Field(ge=1, le=1000)] = 1
    returned: Annotated[int | float, Field(ge=0, le=100)] = 2
    used: Share = 0.7
    exchange_s: Seconds = 0.0
    bearable: Share = 0.1
    drift: Drift | None = None
    most_drift: Annotated[int | float, Field(gt=0, le=1e6)] = 16

    def link_s(self, density: float) -> float:
        """Seconds of a step in which the slowest link carries what a step of this density sends."""
        islands = len(self.bandwidths)
        sent = np.array([density, min(1.0, self.returned * density)])
        carried = sent * (self.value_bytes + index_bytes(sent) / BLOCK_ENTRIES)
        return float((islands - 1) / islands * self.entries / self.every * carried.sum() / min(self.bandwidths))

    def drift_at(self, density: float) -> float | None:
        """Steps' worth of updates that would wait with this density; None where drift was not measured."""
        return None if self.drift is None else self.drift.steps * self.drift.density / density


@dataclass(frozen=True, slots=True)
class ExchangeDensityPlan:
    """density: the share of its entries that an island sends of what is due. link_s: as `link_s` says of it. held_by:
    what it does not go beyond, or below (`drift`)."""

    density: float
    link_s: float
    held_by: HeldBy


def plan_exchange_density(given: ExchangeDensityInput) -> ExchangeDensityPlan:
    """The largest density that links carry, that teaches something and that devices bear; the last gives way to drift.
    LEAST where links do not carry that."""
    density, held_by = _worth_sending(given)
    if given.link_s(density) > given.used * given.step_s:
        density, held_by = _carried(given), "links"
    density = max(LEAST, min(density, 1.0))
    return ExchangeDensityPlan(density, given.link_s(density), held_by)


def _worth_sending(given: ExchangeDensityInput) -> tuple[float, HeldBy]:
    """Whatever links carry."""
    bearable = given.enough
    if given.exchange_s > 0:
        bearable = given.bearable * given.step_s / given.exchange_s * given.every
    if bearable >= given.enough:
        return given.enough, "learning"
    needed = 0.0 if given.drift is None else given.drift.density * given.drift.steps / given.most_drift
    if needed <= bearable:
        return bearable, "devices"
    return min(needed, given.enough), "drift"


def _carried(given: ExchangeDensityInput) -> float:
    """The density at which the slowest link is filled as it may be; bytes grow with the density."""
    low, high = 0.0, given.enough
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if given.link_s(middle) > given.used * given.step_s:
            high = middle
        else:
            low = middle
    return low
