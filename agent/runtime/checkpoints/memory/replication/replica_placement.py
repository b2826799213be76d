"""Turns the controller's placement of machines into ranks: whose shard is copied to whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from humanize import naturalsize

from atoll.agent.runtime.session.session import Session
from atoll.planning.replica_room import fitted


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """The placement as one rank sees it. nodes, held_by: by rank; nodes: empty where they are not known."""

    rank: int
    nodes: tuple[str, ...]
    held_by: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(session: Session) -> ReplicaPlacement:
        memory, place = session.memory, session.place
        if memory is None or len(memory.nodes) != place.world_size:
            return ReplicaPlacement(place.rank, (), ((),) * place.world_size)
        return ReplicaPlacement(place.rank, memory.nodes, tuple(holders(memory.nodes, memory.kept_by)))

    @property
    def any(self) -> bool:
        """True if any of the run's shards is copied."""
        return any(self.held_by)

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold this rank's copies."""
        return self.held_by[self.rank]

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks whose copies this rank holds."""
        return owners(self.held_by, self.rank)

    @property
    def own_here(self) -> frozenset[int]:
        """Shards of the ranks on this node."""
        if not self.nodes:
            return frozenset(range(len(self.held_by)))
        return frozenset(rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank])

    @property
    def here(self) -> frozenset[int]:
        """Shards that lie on this node, its own and copies."""
        own = self.own_here
        return own | {owner for owner, ranks in enumerate(self.held_by) if own & set(ranks)}

    def fitted(self, room_bytes: Sequence[int], shard_bytes: Sequence[int]) -> tuple[ReplicaPlacement, list[str]]:
        """Return the placement with copies only where they fit, and sentences on the others for people. room_bytes: by
        rank, for all that it holds. shard_bytes: by rank, of all files of its shard; as `fitted` takes them."""
        if not self.any:
            return self, []
        found = fitted(self.held_by, self.nodes, room_bytes, shard_bytes)
        said = []
        for owner, (before, after) in enumerate(zip(self.held_by, found, strict=True)):
            for holder in sorted({*before} - {*after}):
                instead = sorted({self.nodes[one] for one in after} - {self.nodes[one] for one in before})
                where = f"lies on {', '.join(instead)} instead" if instead else "has no place"
                said.append(
                    f"the copy of rank {owner}'s state ({naturalsize(shard_bytes[owner])}) does not fit on "
                    f"{self.nodes[holder]}, where rank {holder} has {naturalsize(room_bytes[holder])}, and {where}"
                )
        return replace(self, held_by=tuple(found)), said


def holders(nodes: Sequence[str], kept_by: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return by rank the ranks that hold a copy of its shard. nodes: by rank. kept_by: by rank, nodes other than its
    own, as positions in the order in which nodes first appear. A node's ranks share the work."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    order = list(by_node)
    found: list[tuple[int, ...]] = []
    for node, positions in zip(nodes, kept_by, strict=True):
        local = len([rank for rank in by_node[node] if rank < len(found)])  # how many of this node came before
        others = [by_node[order[at]] for at in positions if order[at] != node]
        found.append(tuple(ranks[local % len(ranks)] for ranks in others))
    return found


def owners(held_by: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """Return the ranks whose copies `rank` holds."""
    return tuple(owner for owner, ranks in enumerate(held_by) if rank in ranks)
