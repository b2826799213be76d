"""Finds a member of a run by its number: on which node it is, and which public key it has. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.v1.agents_pb2 import DataKeys, Launch, View
from atoll.v1.worker_pb2 import Welcome


@dataclass(frozen=True, slots=True)
class RankedMember:
    node: str
    public_key: bytes  # empty where the run has none


def member_of(welcome: Welcome, rank: int) -> RankedMember | None:
    """The worker with this number in the run. The newest view knows those who came later, the launch all others."""
    launch = welcome.launch
    for view in (welcome.view, launch.joins):
        if (found := _in_view(view, rank)) is not None:
            return found
    return _in_launch(launch, launch.keys, rank)


def _in_view(view: View, rank: int) -> RankedMember | None:
    for one in view.members:
        if one.member.rank == rank:
            return RankedMember(one.member.node, one.public_key)
    return None


def _in_launch(launch: Launch, keys: DataKeys, rank: int) -> RankedMember | None:
    for place, member in enumerate(launch.members):
        if member.rank == rank:
            return RankedMember(member.node, keys.public[place] if place < len(keys.public) else b"")
    return None
