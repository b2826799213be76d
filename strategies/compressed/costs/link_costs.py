"""Costs that a worker has measured, and their carry-over to the run's next view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

Cost: TypeAlias = list[float]
"""[seconds, seconds a byte]: a message of b bytes takes the first plus b times the second."""


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """link: cost of an exchange of all with all, by the bytes that a rank posts. allreduce: cost of an all-reduce among
    `ranks` ranks, by the bytes of a gradient."""

    link: Cost
    allreduce: Cost
    ranks: int

    def among(self, ranks: int) -> LinkCosts:
        """Return the costs among another number of ranks: an all-reduce has 2 (n - 1) turns, each of an n-th of the
        bytes."""
        turns = (ranks - 1) / (self.ranks - 1)
        alpha, beta = self.allreduce
        return LinkCosts(self.link, [alpha * turns, beta * turns * self.ranks / ranks], ranks)

    def slowed_to(self, link: Cost) -> LinkCosts:
        """Return the costs with new members whose exchange has this cost, if that is slower."""
        (alpha, beta), (least_s, byte_s) = self.link, self.allreduce
        slower = max(link[1] / beta, 1.0) if beta else 1.0
        return LinkCosts([max(alpha, link[0]), max(beta, link[1])], [least_s, byte_s * slower], self.ranks)


@dataclass(slots=True)
class LearnedCosts:
    """Costs that one worker keeps from view to view. compression: by direction and device. took_part: this worker's own
    links are among the measured ones. rounds: number of rounds since the measurement."""

    compression: dict[str, Cost] = field(default_factory=dict)
    links: LinkCosts | None = None
    took_part: bool = False
    rounds: int = 0

    def packed(self) -> bytes:
        """Return the link costs as bytes for other ranks; empty if nothing is known."""
        if self.links is None:
            return b""
        links = self.links
        told = [self.took_part, self.rounds, links.ranks, *links.link, *links.allreduce]
        return np.array(told, np.float64).tobytes()


@dataclass(frozen=True, slots=True)
class AgreedCosts:
    """Costs that ranks of the previous view know together, the same on all. new: ranks whose links no rank knows,
    ascending. known: one other rank."""

    links: LinkCosts
    rounds: int
    known: int
    new: tuple[int, ...]

    @classmethod
    def of(cls, told: Sequence[bytes], circle: Sequence[int]) -> AgreedCosts | None:
        """Combine the ranks' costs. told: by rank, from LearnedCosts.packed. circle: the ranks whose links count. None:
        no rank knows anything.

        The last rank to enter an exchange does not wait: of several measurements the least counts."""
        each = {rank: np.frombuffer(one, np.float64).tolist() for rank, one in enumerate(told) if one}
        took_part = [rank for rank in circle if rank in each and each[rank][0]]
        if not took_part:
            return None
        rows = [each[rank] for rank in took_part]
        known = [LinkCosts(row[3:5], row[5:7], round(row[2])).among(len(told)) for row in rows]
        link, allreduce = least_cost([one.link for one in known]), least_cost([one.allreduce for one in known])
        return cls(
            LinkCosts(link, allreduce, len(told)),
            round(max(row[1] for row in rows)),
            took_part[0],
            tuple(rank for rank in circle if rank not in took_part),
        )


def least_cost(costs: Sequence[Sequence[float]]) -> Cost:
    """Return the least seconds and the least seconds a byte of several costs."""
    return [min(cost[place] for cost in costs) for place in range(2)]
