"""Turns the controller's placement of machines into ranks: whose shard is copied to whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.agent.runtime.api.session import Session


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """The placement as one rank sees it."""

    any: bool  # of the run's shards is copied
    holders: tuple[int, ...]  # of this rank's copies
    owners: tuple[int, ...]  # whose copies this rank holds
    here: frozenset[int]  # shards that lie on this node

    @staticmethod
    def of(session: Session) -> ReplicaPlacement:
        memory, place = session.memory, session.place
        if memory is None or len(memory.nodes) != place.world_size:
            return ReplicaPlacement(False, (), (), frozenset(range(place.world_size)))
        held_by = holders(memory.nodes, memory.kept_by)
        return ReplicaPlacement(
            any=any(held_by),
            holders=held_by[place.rank],
            owners=owners(held_by, place.rank),
            here=on_node(memory.nodes, held_by, memory.nodes[place.rank]),
        )


def holders(nodes: Sequence[str], kept_by: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """By rank, the ranks that hold a copy of its shard. nodes: by rank. kept_by: by rank, nodes other than its own, as
    positions in the order in which nodes first appear. A node's ranks share the work."""
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
    """Whose copies `rank` holds."""
    return tuple(owner for owner, ranks in enumerate(held_by) if rank in ranks)


def on_node(nodes: Sequence[str], held_by: Sequence[tuple[int, ...]], node: str) -> frozenset[int]:
    """The shards that lie on this node, its own and copies."""
    own = {rank for rank, at in enumerate(nodes) if at == node}
    return frozenset(own | {owner for owner, ranks in enumerate(held_by) if own & set(ranks)})
