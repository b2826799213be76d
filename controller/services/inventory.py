"""JobService.Checkpoints and Remove: ask the nodes for their inventories, or to remove what they have of a job."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch
from atoll.controller.jobs.records.job_state import JobState
from atoll.errors import Conflict
from atoll.v1 import agents_pb2, jobs_pb2

OWN, OTHERS, DISK, STORE = "own memory", "others' memory", "disk", "store"
COMPLETE, IN_PROGRESS, INCOMPLETE, DAMAGED = "complete", "in progress", "incomplete", "damaged"
MAX_ROWS: Final = 1024
_TIERS: Final = {OWN: 0, OTHERS: 1, DISK: 2, STORE: 3}

ANSWER_S: Final = 3.0
STORE_ANSWER_S: Final = 10.0
"""An agent gives an object store 8 s."""
REMOVE_ANSWER_S: Final = 75.0
"""An agent gives an object store 60 s to remove what it has."""
MAX_NOTES: Final = 256
_SHOWN: Final = 4
MAX_RUNS: Final = 16

Members = Mapping[int, Sequence[str]]
"""Nodes of each rank, by run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesInventory:
    """Nodes' checkpoints of a job. by_node: of those that answered. silent: those that did not in time. gone: those
    of its last run that are not connected. store_unseen: no node could read its object store."""

    by_node: Mapping[str, agents_pb2.Inventory]
    silent: Sequence[str]
    gone: Sequence[str]
    store_unseen: bool


async def take(epoch: LeaderEpoch, state: JobState, deadline_s: float, **removing: bool) -> NodesInventory:
    """Ask all nodes that are connected. removing: as of AgentSession.take_inventory."""
    job, sessions = state.job, epoch.sessions.connected
    directory = job.spec.checkpoint.directory
    trained = [member.node for member in state.run.members] if state.run is not None else []
    in_store = "://" in directory
    store_reader = next((node for node in [*trained, *sorted(sessions)] if node in sessions), None)  # one is enough
    asked = {
        node: session.take_inventory(job.id, directory, store=in_store and node == store_reader, **removing)
        for node, session in sessions.items()
    }
    if asked:
        _, late = await asyncio.wait(asked.values(), timeout=deadline_s)
        for answer in late:
            answer.cancel()
    return NodesInventory(
        by_node={node: answer.result() for node, answer in asked.items() if not answer.cancelled()},
        silent=[node for node, answer in asked.items() if answer.cancelled()],
        gone=[node for node in dict.fromkeys(trained) if node not in asked],
        store_unseen=in_store and store_reader is None,
    )


async def checkpoints(epoch: LeaderEpoch, state: JobState) -> jobs_pb2.CheckpointsReply:
    """Return the checkpoints of a job, running or over."""
    job = state.job
    directory = job.spec.checkpoint.directory
    found = await take(epoch, state, deadline_s=STORE_ANSWER_S if "://" in directory else ANSWER_S)
    notes = [_gone(epoch, node) for node in found.gone]
    if found.store_unseen:
        notes.append(f"no node is connected that could look into {directory}")
    notes += [f"node {node} did not answer: what it has is not shown" for node in found.silent]
    notes += [f"node {node}: {trouble}" for node, one in found.by_node.items() for trouble in one.troubles]
    runs = {shard.run for inventory in found.by_node.values() for shard in inventory.memory if shard.run}
    members = {run: await epoch.ledger.nodes_of(job.id, run) for run in sorted({*runs, job.status.run})[-MAX_RUNS:]}
    rows = put_together(found.by_node, members)
    return jobs_pb2.CheckpointsReply(job=job.id, checkpoints=rows, notes=notes[:MAX_NOTES])


def _gone(epoch: LeaderEpoch, node: str) -> str:
    known = epoch.sessions.nodes_named([node]).get(node)
    since = (
        ""
        if known is None or known.last_message_s is None
        else f" (last heard {time.monotonic() - known.last_message_s:.0f} s ago)"
    )
    return f"node {node} is gone{since}: what it had in memory may be lost; what is on its disk comes back with it"


def put_together(inventories: Mapping[str, agents_pb2.Inventory], members: Members) -> list[jobs_pb2.StoredCheckpoint]:
    """Everything that is there, the newest first and in that the fastest tier. inventories: by node.

    A shard is a node's own where the rank of its number trained there in the shard's run, a copy elsewhere."""
    rows = [
        *_in_memory(inventories, members),
        *_held(DISK, ((node, held) for node, inventory in sorted(inventories.items()) for held in inventory.disk)),
        *_held(STORE, (("", held) for inventory in inventories.values() for held in inventory.store)),
    ]
    return sorted(rows, key=lambda row: (-row.run, -row.step, _TIERS[row.tier], row.path))[:MAX_ROWS]


def _in_memory(
    inventories: Mapping[str, agents_pb2.Inventory], members: Members
) -> Iterable[jobs_pb2.StoredCheckpoint]:
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
    """Return the tier of a shard. If the run is no longer recorded, every shard counts as own."""
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


async def remove(epoch: LeaderEpoch, name: str, *, keep_checkpoints: bool, by: str) -> jobs_pb2.RemoveReply:
    """Remove what nodes and object store have of a job, then the job. May be repeated. by: the user who asked for it.

    Raises NotFound, Conflict."""
    state = epoch.removable(name)
    job = state.job
    found = await take(epoch, state, REMOVE_ANSWER_S, remove=True, keep_checkpoints=keep_checkpoints)
    if not keep_checkpoints and (left := list(_left(found))):
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise Conflict(
            f"job {job.id} stays, as not all of its checkpoints could be removed: "
            f"{'; '.join(left[:_SHOWN])}{more}. Repeat it, or leave them where they are with --keep-checkpoints"
        )
    directory = job.spec.checkpoint.directory
    where = f"{directory}/{job.id}" if directory.startswith("/") else f"{job.id} in its --jobs-dir"
    notes = [f"node {node} is gone: what it has on disk stays there, in {where}" for node in found.gone]
    kept = "; its checkpoints were kept" if keep_checkpoints else ""
    await epoch.remove(job.id, f"job {job.id}, {job.status.phase.lower()}, was removed ({by}){kept}")
    return jobs_pb2.RemoveReply(job=job.id, notes=() if keep_checkpoints else notes[:MAX_NOTES])


def _left(found: NodesInventory) -> Iterator[str]:
    """Yield sentences on what could not be removed."""
    if found.store_unseen:
        yield "no node is connected that could remove what is in the object store"
    yield from (f"node {node} did not answer" for node in found.silent)
    for node, inventory in found.by_node.items():
        yield from (f"node {node}: {trouble}" for trouble in inventory.troubles)
        yield from (f"node {node} still has {held.path}" for held in (*inventory.disk, *inventory.store))
