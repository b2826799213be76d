"""Gathers where the members of a view stand, each at the boundary whose state it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.transport.process_groups import Group, gathered_rows


class Standpoint(NamedTuple):
    """counts: whether its state is that of a whole update. seen_step: as Saver has it."""

    counts: int
    step: int
    epoch: int
    consumed: int
    seen_step: int

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.consumed, self.step)


def standpoints(group: Group | None, own: Position, seen_step: int, *, counts: bool) -> list[Standpoint]:
    """By rank. Collective; raises PeerLost."""
    mine = Standpoint(int(counts), own.step, own.epoch, own.consumed, seen_step)
    return [Standpoint(*row) for row in gathered_rows(group, mine)]


def newest(rows: Sequence[Sequence[int]]) -> int | None:
    """Whose state holds: the lowest rank of those with the highest step. rows: by rank (whether it counts, step, ...).
    None where none counts. Pure."""
    there = [(-row[1], rank) for rank, row in enumerate(rows) if row[0]]
    return min(there)[1] if there else None
