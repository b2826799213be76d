"""Choose the share of its model that an island sends through aggregators, how late updates may be, and how many turns
the model takes.

The share is at most what its link carries, what teaches something, and what its devices bear; the last gives way if
islands would drift apart.

An island of n sends the due share of each entry to its aggregator, the largest blocks first. As aggregator of a part of
the model it returns to every island the difference from the shared parameters:

    bytes(d) = (n - 1) / n * entries / every * (d b(d) + r b(r)),  r = min(1, returned d)

with b(d) bytes an entry, value and part of an index. As much arrives as leaves, whatever n is.

Drift is the unsent part of an island's updates, in steps' worth of them, of the island that has most. It falls about as
the density grows, so if it was measured at d, it is within a bound from this density on:

    drift / bound * d

An island's progress is of use to others once they have it. Beyond the bound a byte is worth more than the devices'
time, below it less.

An exchange takes beside_s more than its bytes on the link: the way to an aggregator and back, and its computing. No
step waits for it if others' updates may be as many steps late as it is long:

    staleness = ceil((beside_s + bytes / bandwidth) / step)

Each such step cost a twentieth of a step's learning in the race, and waiting costs all of it: so neither fewer nor
more.

A scan of all entries for those to send takes scan_s on the devices, and an H-th of it in a step if they take H turns.
The same bytes taught as much, as long as no more than `enough` of the due entries is sent. So turns are doubled until
the scan takes no more than `looked` of a step.

Gradients are taken at an island's own weights, which have its own updates at once. If islands have nothing in common,
their own weights fit their own data alone. Beyond most_advantage, a logarithm of losses, the shared model learns more
from gradients that are taken at it. In the race the logarithm was 1.1 to 5 if each island had classes of its own, and
0.4 at most elsewhere but for one window of 0.4 to 1.1, after which both ways ended alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import Field

from atoll.controller.planners.islands.wire_bytes import BLOCK_ENTRIES, index_bytes
from atoll.planning.schemas import MAX_NODES, BytesPerSecond, Schema, Seconds, Share, TotalBatch

MIN_DENSITY: Final = 0.0001
"""Smallest density that workers accept."""
BISECTION_STEPS: Final = 40
"""Halvings of the range of densities."""
ROUNDING_STEPS: Final = 1e-9
"""Part of a step that rounding errors may add to a staleness."""

STEPS_BY_DENSITY: Final = ((0.2, 1.0), (0.146, 1.0), (0.045, 1.29), (0.014, 1.71))
"""Pairs of a density and the steps to the target for one at density 0.2, in the race: medians of three seeds
(docs/performance.md, "What a link bears")."""

LATE: Final = 0.05
"""Share of a step that is lost for each step by which others' updates come later than one (docs/performance.md, "Late
updates and turns")."""

HeldBy = Literal["links", "devices", "learning", "drift", "given"]


class Drift(Schema):
    """steps: unsent updates of an island at this density, in steps' worth of its own updates."""

    steps: Annotated[float, Field(ge=0, le=1e9)]
    density: Annotated[float, Field(ge=MIN_DENSITY, le=1)]


class ExchangeDensityInput(Schema):
    """entries: number of the model's parameters. every: steps between two exchanges of one entry, the least that may be
    planned. value_bytes: bytes of a value on the wire. returned: entries that an aggregator returns for one that an
    island sends. bandwidths: bytes a second of each island's link, in the direction that carries less. step_s: seconds
    of the slowest device, without waiting. used: share of a link's time in a step that may be filled.

    exchange_s: seconds by which density 1 lengthens a step on the devices against density 0. bearable: share of a step
    that the exchange may take there. enough: the density beyond which more teaches nothing. drift: as measured.
    most_drift: unsent updates, in steps' worth, that are allowed if devices would rather send less. beside_s, scan_s:
    as above. looked: share of a step that a scan may take. most_every, most_staleness: the most that may be planned.
    density: if given, it stays. advantage: the logarithm of the shared model's loss over that of an island's own
    weights, on its own data; None if not measured."""

    entries: TotalBatch
    bandwidths: Annotated[tuple[BytesPerSecond, ...], Field(min_length=2, max_length=MAX_NODES)]
    step_s: Annotated[float, Field(gt=0, le=1e6)]
    value_bytes: Annotated[int | float, Field(gt=0, le=8)]
    enough: Annotated[float, Field(ge=MIN_DENSITY, le=1)]
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
    density: Annotated[float, Field(ge=MIN_DENSITY, le=1)] | None = None
    advantage: Annotated[int | float, Field(ge=0, le=100)] | None = None
    most_advantage: Annotated[int | float, Field(gt=0, le=1e6)] = 1

    def link_s(self, density: float) -> float:
        """Return the seconds of a step in which the slowest link carries what a step of this density sends."""
        islands = len(self.bandwidths)
        sent = (density, min(1.0, self.returned * density))
        carried = sum(one * (self.value_bytes + index_bytes(one) / BLOCK_ENTRIES) for one in sent)
        return (islands - 1) / islands * self.entries / self.every * carried / min(self.bandwidths)

    def drift_at(self, density: float) -> float | None:
        """Return the unsent updates at this density, in steps' worth; None if drift was not measured."""
        return None if self.drift is None else self.drift.steps * self.drift.density / density

    def late(self, density: float) -> float:
        """Return the length of an exchange of this density, in steps."""
        return (self.beside_s + self.link_s(density)) / self.step_s


@dataclass(frozen=True, slots=True)
class ExchangeDensityPlan:
    """density: the share of the due entries that an island sends. link_s: seconds of a step in which the slowest link
    carries it. held_by: the limit that the density does not exceed, or stay below (`drift`). every: steps between two
    exchanges of one entry. staleness: steps that others' updates may be late. at_shared_params: gradients are taken at
    the shared parameters."""

    density: float
    link_s: float
    held_by: HeldBy
    every: int
    staleness: int
    at_shared_params: bool


def plan_exchange_density(given: ExchangeDensityInput) -> ExchangeDensityPlan:
    """Plan the largest density that links carry, that teaches something and that devices bear; the last gives way to
    drift. MIN_DENSITY if links do not carry that."""
    density, held_by = _worth_sending(given) if given.density is None else (given.density, "given")
    if given.density is None and given.link_s(density) > given.used * given.step_s:
        density, held_by = _carried(given), "links"
    density = max(MIN_DENSITY, min(density, 1.0))
    staleness = min(max(1, math.ceil(given.late(density) - ROUNDING_STEPS)), given.most_staleness)
    every = _turns(given, density)
    at_shared_params = given.advantage is not None and given.advantage > given.most_advantage
    return ExchangeDensityPlan(
        density * every / given.every, given.link_s(density), held_by, every, staleness, at_shared_params
    )


def steps_for_one_at(density: float, staleness: int = 1) -> float:
    """Return the steps that teach as much as one with density 0.2 and staleness 1: between and below the measured
    densities a straight line over the density's logarithm."""
    return _steps_by_density(density) * (1 + LATE * max(0, staleness - 1))


def _steps_by_density(density: float) -> float:
    if density >= STEPS_BY_DENSITY[0][0]:
        return 1.0
    (above, more), (below, most) = next(
        (pair for pair in pairwise(STEPS_BY_DENSITY) if density >= pair[1][0]),
        (STEPS_BY_DENSITY[-2], STEPS_BY_DENSITY[-1]),
    )
    return more + (most - more) * math.log(above / density) / math.log(above / below)


def _turns(given: ExchangeDensityInput, density: float) -> int:
    """Return the steps between two exchanges of one entry. density: the one planned for the fewest."""
    every, most_density = given.every, min(given.enough, 1.0)
    while given.scan_s / every > given.looked * given.step_s and 2 * every <= given.most_every:
        if density * 2 * every / given.every > most_density:
            break
        every *= 2
    return every


def _worth_sending(given: ExchangeDensityInput) -> tuple[float, HeldBy]:
    """Return the density that is worth sending over links without limit, and its reason."""
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
    """Return the density that fills the slowest link as far as it may be; bytes grow with the density."""
    low, high = 0.0, given.enough
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if given.link_s(middle) > given.used * given.step_s:
            high = middle
        else:
            low = middle
    return low
