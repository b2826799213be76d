"""A job's checkpoints, put together from the inventories of the nodes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from atoll.v1 import agents_pb2, jobs_pb2

OWN, OTHERS, DISK, STORE = "own memory", "others' memory", "disk", "store"
COMPLETE, IN_PROGRESS, INCOMPLETE, DAMAGED = "complete", "in progress", "incomplete", "damaged"
MAX_ROWS: Final = 1024
_TIERS: Final = {OWN: 0, OTHERS: 1, DISK: 2, STORE: 3}

Members = Mapping[int, Sequence[str]]
"""By run: the node of each rank."""


def put_together(inventories: Mapping[str, agents_pb2.Stock], members: Members) -> list[jobs_pb2.StoredCheckpoint]:
    """Everything that is there, the newest first and in that the fastest tier. inventories: by node.

    A shard is a node's own where the rank of its number trained there in the shard's run, a copy elsewhere."""
    rows = [
        *_in_memory(inventories, members),
        *_held(DISK, ((node, held) for node, inventory in sorted(inventories.items()) for held in inventory.disk)),
        *_held(STORE, (("", held) for inventory in inventories.values() for held in inventory.store)),
    ]
    return sorted(rows, key=lambda row: (-row.run, -row.step, _TIERS[row.tier], row.path))[:MAX_ROWS]


def _in_memory(inventories: Mapping[str, agents_pb2.Stock], members: Members) -> Iterable[jobs_pb2.StoredCheckpoint]:
    generations: dict[tuple[int, int, int], list[tuple[str, agents_pb2.HeldShard]]] = defaultdict(list)
    newest_run = max(members, default=0)
    for node, inventory in sorted(inventories.items()):
        for held in inventory.memory:
            if held.trouble:
                yield jobs_pb2.StoredCheckpoint(
                    tier=_tier(node, held.shard, members.get(newest_run, ())),
                    shards=held.shards,
                    health=DAMAGED,
                    age_s=-1,
                    nodes=[node],
                    trouble=held.trouble,
                )
            elif not held.writing:
                generations[held.run, held.step, held.shards].append((node, held))
    whole = [key for key, found in generations.items() if len({held.shard for _, held in found}) == key[2]]
    newest_whole = max(whole, default=(0, 0, 0))
    for key, found in generations.items():
        run, step, shards = key
        health = COMPLETE if key in whole else IN_PROGRESS if key > newest_whole else INCOMPLETE
        tiers: dict[str, list[tuple[str, agents_pb2.HeldShard]]] = defaultdict(list)
        for node, held in found:
            tiers[_tier(node, held.shard, members.get(run, ()))].append((node, held))
        for tier, parts in tiers.items():
            sizes = {held.shard: held.bytes for _, held in parts}
            yield jobs_pb2.StoredCheckpoint(
                tier=tier,
                run=run,
                step=step,
                shards=shards,
                shards_there=len(sizes),
                bytes=sum(sizes.values()),
                age_s=min(held.age_s for _, held in parts),
                health=health,
                nodes=sorted({node for node, _ in parts}),
            )


def _tier(node: str, shard: int, nodes: Sequence[str]) -> str:
    """Of a run that nobody remembers, every shard counts as own."""
    return OTHERS if shard < len(nodes) and nodes[shard] != node else OWN


def _held(tier: str, found: Iterable[tuple[str, agents_pb2.HeldCheckpoint]]) -> Iterable[jobs_pb2.StoredCheckpoint]:
    """The same checkpoint under the same path of several nodes, which may be one shared disk, is one row."""
    alike: dict[tuple[int, int, str, str, int], list[tuple[str, agents_pb2.HeldCheckpoint]]] = defaultdict(list)
    for node, held in found:
        alike[held.run, held.step, held.path, held.trouble, held.bytes].append((node, held))
    for (run, step, path, trouble, size), those in alike.items():
        yield jobs_pb2.StoredCheckpoint(
            tier=tier,
            run=run,
            step=step,
            shards=1,
            shards_there=0 if trouble else 1,
            bytes=size,
            age_s=min(held.age_s for _, held in those),
            health=DAMAGED if trouble else COMPLETE,
            nodes=sorted({node for node, _ in those if node}),
            path=path,
            trouble=trouble,
        )
