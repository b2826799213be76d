"""The members of a run, the connections between them, and the routes of messages. Pure.

Inside an island everyone is connected with everyone; between islands only the leaders are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    rank: int
    island: int
    """Index of the island: 0, 1, ..."""
    node: str
    """Members of one node may share memory."""
    leader: bool
    """The lowest rank of its island."""

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node}"


def members_of(nodes: Sequence[str], islands: Sequence[str]) -> tuple[Member, ...]:
    """Return members by rank, from each rank's node and island. Islands are numbered in order of appearance."""
    index: dict[str, int] = {}
    members = []
    for rank, (node, island) in enumerate(zip(nodes, islands, strict=True)):
        leader = island not in index
        members.append(Member(rank=rank, island=index.setdefault(island, len(index)), node=node, leader=leader))
    return tuple(members)


@dataclass(frozen=True, slots=True)
class Topology:
    """The run as one rank sees it."""

    me: Member
    members: tuple[Member, ...]
    mates: tuple[int, ...]
    """The others of my island."""
    leaders: tuple[int, ...]
    """Leaders of the other islands; empty if this rank does not lead, since it is not connected with them."""
    my_leader: int
    islands: int

    @staticmethod
    def of(me: int, members: Sequence[Member]) -> Topology:
        """Raises BadInput where ranks or leaders do not fit together."""
        if [member.rank for member in members] != list(range(len(members))) or not 0 <= me < len(members):
            ranks = [member.rank for member in members][:16]
            raise BadInput(f"members of rank {me} must be listed by rank 0, 1, ..., not {ranks}")
        lowest: dict[int, int] = {}
        for member in members:
            if member.leader != (member.island not in lowest):
                raise BadInput(
                    f"{member} of island {member.island}: the lowest rank of an island leads it, nobody else"
                )
            lowest.setdefault(member.island, member.rank)
        if sorted(lowest) != list(range(len(lowest))):
            raise BadInput(f"islands must be numbered 0, 1, ..., not {sorted(lowest)[:16]}")
        own = members[me]
        mates = tuple(member.rank for member in members if member.island == own.island and member.rank != me)
        leaders = tuple(member.rank for member in members if member.leader and member.island != own.island)
        return Topology(own, tuple(members), mates, leaders if own.leader else (), lowest[own.island], len(lowest))

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the connected ranks."""
        return (*self.mates, *self.leaders)

    def routes(self, kind: Kind) -> tuple[int, ...]:
        """Return the destinations of an own message; a DIRECT or TO_AGGREGATOR message names its own."""
        match kind:
            case Kind.PART:
                return self.mates
            case Kind.SUM:
                return self.leaders
            case _:
                return self.peers

    def relays(self, kind: Kind, sender: int) -> tuple[int, ...]:
        """Return the ranks to which a message from the peer `sender` is relayed."""
        if not self.me.leader or kind in {Kind.PART, Kind.HELLO, Kind.DIRECT, Kind.TO_AGGREGATOR}:
            return ()
        if self.members[sender].island != self.me.island:
            return self.mates
        return () if kind in {Kind.SUM, Kind.FROM_AGGREGATOR} else self.leaders

    def accepts(self, kind: Kind, origin: int, sender: int) -> bool:
        """Return True if the peer `sender` may deliver a message of `origin`: a mate its own, a leader its island's,
        and the own leader all other islands'."""
        there = self.members[sender]
        mate = there.island == self.me.island
        match kind:
            case Kind.PART:
                return mate and origin == sender
            case Kind.HELLO | Kind.DIRECT:
                return origin == sender
            case Kind.SUM | Kind.FROM_AGGREGATOR if mate:
                of_another = origin != self.me.island or kind is Kind.FROM_AGGREGATOR
                return sender == self.my_leader and of_another and origin < self.islands
            case Kind.SUM | Kind.FROM_AGGREGATOR:
                return origin == there.island
            case Kind.TO_AGGREGATOR:
                return not mate and origin == there.island
        if origin == sender:
            return True
        if origin >= len(self.members):
            return False
        if mate:
            return sender == self.my_leader and self.members[origin].island != self.me.island
        return self.members[origin].island == there.island
