"""Puts copies of checkpoints in memory where they fit. Of planner `placement`, before a run begins, and of its workers,
who know what is free then: both rooms read it here. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def fitted(
    held_by: Sequence[Sequence[int]], nodes: Sequence[Hashable], room_bytes: Sequence[int], shard_bytes: Sequence[int]
) -> list[tuple[int, ...]]:
    """`held_by` with what does not fit moved to the holder with the most room, on a machine that has none of that
    shard; left out where there is none. A holder's own shard comes first.

    held_by: by owner, the holders of its copies; owners and holders alike are ranks, or machines. nodes: of each, its
    machine. room_bytes: of each, for all that it holds; shard_bytes: of each, what its shard takes wherever it lies."""
    left = [room - own for room, own in zip(room_bytes, shard_bytes, strict=True)]
    found: list[list[int]] = [[] for _ in held_by]
    homeless = []
    for owner, holders in enumerate(held_by):
        for holder in holders:
            if left[holder] >= shard_bytes[owner]:
                found[owner].append(holder)
                left[holder] -= shard_bytes[owner]
            else:
                homeless.append(owner)
    for owner in homeless:
        taken = {nodes[one] for one in (owner, *found[owner])}
        rooms = [(room, -one) for one, room in enumerate(left) if nodes[one] not in taken]
        room, holder = max(rooms, default=(-1, 0))
        if room >= shard_bytes[owner]:
            found[owner].append(-holder)
            left[-holder] -= shard_bytes[owner]
    return [tuple(each) for each in found]
