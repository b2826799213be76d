"""Gather the step boundaries from which the members of a view could continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.transport.process_groups import Group, gathered_rows


class MemberPosition(NamedTuple):
    """Boundary of one member. counts: 1 if its state is that of a whole update. seen_step: as `Saver` has it."""

    counts: int
    step: int
    epoch: int
    consumed: int
    seen_step: int

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.consumed, self.step)


def gather_positions(group: Group | None, own: Position, seen_step: int, *, counts: bool) -> list[MemberPosition]:
    """Return the boundaries of all members, by rank. Collective; raises PeerLost."""
    mine = MemberPosition(int(counts), own.step, own.epoch, own.consumed, seen_step)
    return [MemberPosition(*row) for row in gathered_rows(group, mine)]


def newest_rank(rows: Sequence[Sequence[int]]) -> int | None:
    """Return the lowest of the ranks that have the newest whole state; None if no state is whole. Pure.

    rows: by rank, as `MemberPosition`: whether the state counts, its step, ..."""
    whole = [(-row[1], rank) for rank, row in enumerate(rows) if row[0]]
    return min(whole)[1] if whole else None
