"""The view of a run as one of its workers reads it from the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings
from atoll.v1 import agents_pb2
from atoll.v1.agents_pb2 import Member
from atoll.v1.common_pb2 import Plan

MAX_MEMBERS: Final = 4096
"""Members of a view; a message that names more is malformed."""
MAX_MEETING_S: Final = 300.0
"""The longest time, in seconds, that a view may give its members to meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipView:
    """One membership of the run. Sequences are by position, which is the rank in collectives."""

    number: int
    ranks: tuple[int, ...]  # of the members in their run, for good
    members: tuple[Member, ...]
    has_state: tuple[bool, ...]
    keys: tuple[bytes, ...]  # public ones; empty where the run has none
    place: WorkerPlace | None  # this worker's; None: it is no member
    port: int  # where they meet, at the place's master address
    plan: Plan
    strategy: StrategySettings | None  # None: as in the view before
    at_boundary: bool
    meet_s: float
    reason: str


def view_from_wire(wire: agents_pb2.View, rank: int, before: WorkerPlace) -> MembershipView:
    """Return the view for worker `rank` of the run. before: its place at its launch. Raises BadInput."""
    what = f"view {wire.view} of run {wire.run}"
    ranks = tuple(one.member.rank for one in wire.members)
    if not 1 <= len(ranks) <= MAX_MEMBERS or len(set(ranks)) != len(ranks):
        raise BadInput(f"{what} names {len(ranks)} members; it needs 1 to {MAX_MEMBERS}, each once")
    if not 0 < wire.master_port < 2**16 or not wire.master_address:
        raise BadInput(f"{what} says to meet at {wire.master_address!r}:{wire.master_port}, which is no address")
    if not 0 < wire.meet_s <= MAX_MEETING_S:
        raise BadInput(f"{what} has meet_s = {wire.meet_s}; it must be above 0 and at most {MAX_MEETING_S:.0f}")
    keys = tuple(one.public_key for one in wire.members)
    return MembershipView(
        number=wire.view,
        ranks=ranks,
        members=tuple(one.member for one in wire.members),
        has_state=tuple(one.has_state for one in wire.members),
        keys=keys if all(keys) else (),
        place=_place(wire, ranks.index(rank), before) if rank in ranks else None,
        port=wire.master_port,
        plan=wire.plan,
        strategy=strategy_from_wire(wire),
        at_boundary=wire.at_boundary,
        meet_s=wire.meet_s,
        reason=wire.reason,
    )


def strategy_from_wire(wire: agents_pb2.View) -> StrategySettings | None:
    """Return the settings of the view's strategy; None if it names none. Raises BadInput."""
    if not wire.strategy:
        return None
    return registry.find(wire.strategy, "view.strategy").read_settings(wire.strategy_settings, "view.strategy_settings")


def _place(wire: agents_pb2.View, position: int, before: WorkerPlace) -> WorkerPlace:
    nodes: Sequence[str] = [one.member.node for one in wire.members]
    here = [place for place, node in enumerate(nodes) if node == nodes[position]]
    return WorkerPlace(
        rank=position,
        world_size=len(nodes),
        local_rank=here.index(position),
        local_world_size=len(here),
        master_address=wire.master_address,
        agent=before.agent,
    )
