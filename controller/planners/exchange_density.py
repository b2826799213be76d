"""Chooses how much of its model an island sends of a step through owners: what its link carries beside it, no more than
teaches something, and no more than its devices bear, unless islands would drift apart. And how late others' updates may
be, and in how many turns the model goes.

An island of n sends the due share of each entry to its owner, the heaviest blocks first, and as owner of a part of the
model sends back to everybody what the masters lack:

    bytes(d) = (n - 1) / n * entries / every * (d b(d) + r b(r)),  r = min(1, returned d)

with b(d) bytes an entry, value and part of an index. As much comes as goes, whatever n is.

Drift is what the island that has most of it has not sent, in steps' worth of its own updates. It falls about as the
density grows, so measured at d it is within a bound from

    drift / bound * d

on. What an island learns is of use to others once they have it: beyond the bound a byte is worth more than the devices'
time, below it less.

An exchange takes beside_s more than its bytes on the link: the way to an owner and back, and its computing. Nobody
waits for it where others' updates may be as many steps late as it is long:

    staleness = ceil((beside_s + bytes / bandwidth) / step)

Each such step cost a twentieth of a step's learning in the race, waiting costs all of it: so neither fewer nor more.

A look at all entries for what to send takes scan_s of the devices, an H-th of it in a step where they go in H turns.
As many bytes taught as much, as long as no more than `enough` of what is due is sent: so turns are doubled until the
look takes no more than `looked` of a step.

Gradients are taken at an island's own weights, which have its own updates at once. Where islands have nothing in common
their own weights are good for their own data alone: beyond most_advantage, a logarithm of losses, the shared model
learns more by gradients that are taken at it. In the race that was 1.1 to 5 where each island had classes of its own,
and 0.4 at most elsewhere but for one window of 0.4 to 1.1, after which both ways ended alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import Field

from atoll.controller.planners.schemas import MAX_NODES, BytesPerSecond, Schema, Seconds, Share, TotalBatch
from atoll.controller.planners.wire_bytes import BLOCK_ENTRIES, index_bytes

LEAST: Final = 0.0001
"""Of what workers take."""
_HALVINGS: Final = 40
_EXACT: Final = 1e-9  # of a step

MEASURED: Final = ((0.2, 1.0), (0.146, 1.0), (0.045, 1.29), (0.014, 1.71))
"""Of a density, steps to the target for one at 0.2, in the race: medians of three seeds (docs/performance.md, "What a
link bears")."""

HeldBy = Literal["links", "devices", "learning", "drift", "given"]


class Drift(Schema):
    """steps: worth of its own updates that an island has not sent, at this density."""

    steps: Annotated[float, Field(ge=0, le=1e9)]
    density: Annotated[float, Field(ge=LEAST, le=1)]


class ExchangeDensityInput(Schema):
    """entries: of the model. every: steps between two exchanges of one. value_bytes: of one on the wire. returned: what
    an owner sends back for what an island sends. bandwidths: bytes a second of each island's link in the
    direction that carries less, for as much comes as goes. step_s: of
    the slowest device, without waiting. used: of a link's time in a step, that may be filled. exchange_s: a step takes
    so much longer on the devices with density 1 than with 0; bearable: of a step, that the exchange may take there.
    enough: the density beyond which more teaches nothing. drift: as measured; most_drift: the steps' worth of updates
    that may wait where devices would rather send less. beside_s, scan_s: as above. looked: of a step, that a look for
    what to send may take. every is the least that may be planned, most_every and most_staleness the most. density:
    where it is given, it stays. advantage: the logarithm of the shared model's loss over that of an
    island's own weights, on its own data; None where that was not measured."""

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
    beside_s: Seconds = 0.0
    most_staleness: Annotated[int, Field(ge=0, le=15)] = 15
    scan_s: Seconds = 0.0
    looked: Share = 0.025
    most_every: Annotated[int, Field(ge=1, le=1000)] = 1
    density: Annotated[float, Field(ge=LEAST, le=1)] | None = None
    advantage: Annotated[int | float, Field(ge=0, le=100)] | None = None
    most_advantage: Annotated[int | float, Field(gt=0, le=1e6)] = 1

    def link_s(self, density: float) -> float:
        """Seconds of a step in which the slowest link carries what a step of this density sends."""
        islands = len(self.bandwidths)
        sent = (density, min(1.0, self.returned * density))
        carried = sum(one * (self.value_bytes + index_bytes(one) / BLOCK_ENTRIES) for one in sent)
        return (islands - 1) / islands * self.entries / self.every * carried / min(self.bandwidths)

    def drift_at(self, density: float) -> float | None:
        """Steps' worth of updates that would wait with this density; None where drift was not measured."""
        return None if self.drift is None else self.drift.steps * self.drift.density / density

    def late(self, density: float) -> float:
        """Steps that an exchange takes with this density."""
        return (self.beside_s + self.link_s(density)) / self.step_s


@dataclass(frozen=True, slots=True)
class ExchangeDensityPlan:
    """density: the share of its entries that an island sends of what is due. link_s: seconds of a step in which the
    slowest link carries it. held_by: what the density does not go beyond, or below (`drift`). every: steps between two
    exchanges of one entry. staleness: steps that others' updates may be late. at_masters: gradients are
    taken at the shared masters."""

    density: float
    link_s: float
    held_by: HeldBy
    every: int
    staleness: int
    at_masters: bool


def plan_exchange_density(given: ExchangeDensityInput) -> ExchangeDensityPlan:
    """The largest density that links carry, that teaches something and that devices bear; the last gives way to drift.
    LEAST where links do not carry that."""
    density, held_by = _worth_sending(given) if given.density is None else (given.density, "given")
    if given.density is None and given.link_s(density) > given.used * given.step_s:
        density, held_by = _carried(given), "links"
    density = max(LEAST, min(density, 1.0))
    staleness = min(max(1, math.ceil(given.late(density) - _EXACT)), given.most_staleness)
    every = _turns(given, density)
    at_masters = given.advantage is not None and given.advantage > given.most_advantage
    return ExchangeDensityPlan(
        density * every / given.every, given.link_s(density), held_by, every, staleness, at_masters
    )


def steps_for_one_at(density: float) -> float:
    """Steps that teach what one with density 0.2 does. Between what was measured, and below it, a straight line over
    the density's logarithm."""
    if density >= MEASURED[0][0]:
        return 1.0
    (above, more), (below, most) = next(
        (pair for pair in pairwise(MEASURED) if density >= pair[1][0]), (MEASURED[-2], MEASURED[-1])
    )
    return more + (most - more) * math.log(above / density) / math.log(above / below)


def _turns(given: ExchangeDensityInput, density: float) -> int:
    """density: with the fewest."""
    every, most_density = given.every, min(given.enough, 1.0)
    while given.scan_s / every > given.looked * given.step_s and 2 * every <= given.most_every:
        if density * 2 * every / given.every > most_density:
            break
        every *= 2
    return every


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
