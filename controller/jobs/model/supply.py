"""Compares what helps each rank of a run, and chooses whom a volunteer helps. Pure.

A run is as fast as the rank whose tasks take longest: in a pipeline the others wait for its stage, among replicas for
its part of the batch. So who comes helps the rank that has least, and one goes there from where most is, if that makes
the least clearly more: by less than MIN_SPEEDUP_TO_MOVE nobody moves, so that nobody moves back.

Where a volunteer has measured its edges (both delays, and what travels over both bandwidths), a rank that is so many
times as far as its nearest one counts as supplied so many times as well: it goes there only where it is missed so much
more. That is the rule of planner `allocation` for layers that are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from atoll.controller.jobs.model.observed import StopRun
from atoll.controller.planners.pipelines.allocation import stage_for

MIN_SPEEDUP_TO_MOVE: Final = 1.25
"""Speedup of the least supplied rank for which a volunteer moves: a start costs it seconds."""


NEAR_S: Final = 0.1
"""Added to all edges: differences of less are turns of busy processes."""

MIN_EDGE_MEASUREMENTS: Final = 2
"""Measurements of its edges that a helper makes, while it computes tasks, before it moves for them."""

Edges: TypeAlias = Mapping[int, float]
"""Seconds from a volunteer to a rank and back, by rank, as far as it measured."""


class MeasuredEdges(NamedTuple):
    """A helper's measurements of its edges: their number, and the newest times."""

    times: int = 0
    last: tuple[Edges, ...] = ()

    def again(self, edges: Edges) -> MeasuredEdges:
        return MeasuredEdges(self.times + 1, (*self.last, edges)[-MIN_EDGE_MEASUREMENTS:])

    @property
    def edges(self) -> Edges:
        """The shortest: what a busy machine adds to one measurement is not of the link."""
        ranks = {rank for one in self.last for rank in one}
        return {rank: min(one[rank] for one in self.last if rank in one) for rank in ranks}


@dataclass(frozen=True, slots=True)
class HelpedRank:
    """A rank that takes help, and where. power: of its own device. per_power: samples a second that a device of power 1
    adds to it, as measured; 0: not known."""

    rank: int
    address: str
    port: int
    power: float = 1.0
    per_power: float = 0.0


class Supply:
    """Supply of the ranks of one run with helpers' power, updated with each decision."""

    def __init__(self, ranks: Sequence[HelpedRank], helpers: Iterable[tuple[int, float]]) -> None:
        """helpers: of each, whom it helps, and its power."""
        self._ranks = {one.rank: one for one in ranks}
        known = all(one.per_power > 0 for one in ranks)
        self._per_power = {one.rank: one.per_power if known else 1.0 for one in ranks}
        self._power = {one.rank: one.power for one in ranks}
        for rank, power in helpers:
            self._add(rank, power)

    @property
    def by_rank(self) -> Mapping[int, float]:
        """Samples a second; powers as long as not all ranks have measured."""
        return {rank: self._power[rank] * per_power for rank, per_power in self._per_power.items()}

    def take(self, power: float, edges: Edges) -> HelpedRank:
        """Add a helper and return the rank that it helps; of equal ones the first."""
        rank = self._least(edges)
        self._add(rank, power)
        return self._ranks[rank]

    def better(self, rank: int, power: float, edges: Edges) -> int | None:
        """Return the rank that a helper of `rank` should help in its place, or None."""
        if rank not in self._ranks or len(self._ranks) == 1:
            return None
        least, supply, far = self._least(edges, but=rank), self.by_rank, self._far(edges)
        left = supply[rank] - power * self._per_power[rank]
        more = supply[least] + power * self._per_power[least]
        supplied = min(left * far[rank], more * far[least])
        return least if supplied > MIN_SPEEDUP_TO_MOVE * supply[least] * far[least] else None

    def _least(self, edges: Edges, but: int | None = None) -> int:
        supply, far = self.by_rank, self._far(edges)
        ranks = sorted(one for one in supply if one != but)
        return ranks[stage_for([far[one] for one in ranks], [supply[one] for one in ranks])]

    def _far(self, edges: Edges) -> Mapping[int, float]:
        """Return each rank's edge time relative to the nearest one's."""
        nearest = min((edges[one] for one in self._ranks if one in edges), default=0.0)
        return {one: (edges.get(one, nearest) + NEAR_S) / (nearest + NEAR_S) for one in self._ranks}

    def _add(self, rank: int, power: float) -> None:
        if rank in self._power:
            self._power[rank] += power


@dataclass(frozen=True, slots=True)
class LaunchHelper:
    node: str
    device: int
    job: str
    run: int
    helps: HelpedRank


@dataclass(frozen=True, slots=True)
class MoveHelper:
    """Instruction to stop a helper, so that its device helps `rank`."""

    node: str
    device: int
    stop: StopRun
    rank: int
