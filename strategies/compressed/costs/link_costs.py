"""The costs that a worker has measured, and what of them holds in the run's next view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

Cost: TypeAlias = list[float]
"""[seconds, seconds a byte]"""


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """link: of an exchange of everybody with everybody, by the bytes that a rank posts. allreduce: of one among so many
    `ranks`, by the bytes of a gradient."""

    link: Cost
    allreduce: Cost
    ranks: int

    def among(self, ranks: int) -> LinkCosts:
        """Of more ranks, or fewer: an all-reduce has 2 (n - 1) turns, each of an n-th of the bytes."""
        turns = (ranks - 1) / (self.ranks - 1)
        alpha, beta = self.allreduce
        return LinkCosts(self.link, [alpha * turns, beta * turns * self.ranks / ranks], ranks)

    def slowed_to(self, link: Cost) -> LinkCosts:
        """With others of which an exchange takes so long, if that is longer."""
        (alpha, beta), (least_s, byte_s) = self.link, self.allreduce
        slower = max(link[1] / beta, 1.0) if beta else 1.0
        return LinkCosts([max(alpha, link[0]), max(beta, link[1])], [least_s, byte_s * slower], self.ranks)


@dataclass(slots=True)
class LearnedCosts:
    """The costs that one worker keeps from view to view. compression: by what and where. took_part: this worker's own
    links are among those that were measured. rounds: since then."""

    compression: dict[str, Cost] = field(default_factory=dict)
    links: LinkCosts | None = None
    took_part: bool = False
    rounds: int = 0

    def packed(self) -> bytes:
        """What other ranks are told of links; empty where nothing is known."""
        if self.links is None:
            return b""
        links = self.links
        told = [self.took_part, self.rounds, links.ranks, *links.link, *links.allreduce]
        return np.array(told, np.float64).tobytes()


@dataclass(frozen=True, slots=True)
class AgreedCosts:
    """What ranks of the view before know together, the same on all. new: ranks of whose links nobody knows, ascending;
    known: one that is not."""

    links: LinkCosts
    rounds: int
    known: int
    new: tuple[int, ...]

    @classmethod
    def of(cls, told: Sequence[bytes], circle: Sequence[int]) -> AgreedCosts | None:
        """told: by rank, as LearnedCosts.packed. circle: the ranks whose links count. None: nobody knows anything.

        Who comes last into an exchange waits for nobody: of what several measured the least counts."""
        each = {rank: np.frombuffer(one, np.float64).tolist() for rank, one in enumerate(told) if one}
        took_part = [rank for rank in circle if rank in each and each[rank][0]]
        if not took_part:
            return None
        rows = [each[rank] for rank in took_part]
        known = [LinkCosts(row[3:5], row[5:7], round(row[2])).among(len(told)) for row in rows]
        link, allreduce = _least([one.link for one in known]), _least([one.allreduce for one in known])
        return cls(
            LinkCosts(link, allreduce, len(told)),
            round(max(row[1] for row in rows)),
            took_part[0],
            tuple(rank for rank in circle if rank not in took_part),
        )


def _least(costs: Sequence[Cost]) -> Cost:
    return [min(cost[place] for cost in costs) for place in range(2)]
