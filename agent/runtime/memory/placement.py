"""Whose shard is copied to whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def holders(nodes: Sequence[str], replicas: int) -> list[tuple[int, ...]]:
    """By rank, the ranks that hold a copy of its shard: on the next replicas - 1 nodes, in the order in which nodes
    first appear, never its own. nodes: by rank. A node's ranks share the work. Fewer where there are fewer nodes."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    order = list(by_node)
    found: list[tuple[int, ...]] = []
    for node in nodes:
        local = len([rank for rank in by_node[node] if rank < len(found)])  # how many of this node came before
        place = order.index(node)
        others = [order[(place + ahead) % len(order)] for ahead in range(1, min(replicas, len(order)))]
        found.append(tuple(by_node[other][local % len(by_node[other])] for other in others))
    return found


def owners(held_by: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """Whose copies `rank` holds."""
    return tuple(owner for owner, ranks in enumerate(held_by) if rank in ranks)


def on_node(nodes: Sequence[str], held_by: Sequence[tuple[int, ...]], node: str) -> frozenset[int]:
    """The shards that lie on this node, its own and copies."""
    own = {rank for rank, at in enumerate(nodes) if at == node}
    return frozenset(own | {owner for owner, ranks in enumerate(held_by) if own & set(ranks)})
