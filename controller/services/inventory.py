"""JobService.Checkpoints: asks the nodes, waits a moment, puts together what they say."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from atoll.controller.jobs.agents.inventory import put_together
from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch
from atoll.controller.jobs.records.ledger import JobState
from atoll.controller.state import keys
from atoll.controller.state.codec import decode
from atoll.controller.state.records import RunRecord
from atoll.v1 import agents_pb2, jobs_pb2

ANSWER_S: Final = 3.0
STORE_ANSWER_S: Final = 10.0
"""An agent gives an object store 8 s."""
MAX_NOTES: Final = 256
MAX_RUNS: Final = 16


async def checkpoints(epoch: LeaderEpoch, state: JobState) -> jobs_pb2.CheckpointsReply:
    """What there is of a job's checkpoints, also of one that is over."""
    job, sessions = state.job, epoch.sessions.connected
    directory = job.spec.checkpoint.directory
    trained = [member.node for member in state.run.members] if state.run is not None else []
    in_store = "://" in directory
    store_reader = next(
        (node for node in [*trained, *sorted(sessions)] if node in sessions), None
    )  # the only one asked about the store
    asked = {
        node: session.take_inventory(job.id, directory, store=in_store and node == store_reader)
        for node, session in sessions.items()
    }
    inventories: dict[str, agents_pb2.Stock] = {}
    notes = [_gone(epoch, node) for node in dict.fromkeys(trained) if node not in asked]
    if in_store and store_reader is None:
        notes.append(f"no node is connected that could look into {directory}")
    if asked:
        _, late = await asyncio.wait(asked.values(), timeout=STORE_ANSWER_S if in_store else ANSWER_S)
        for answer in late:
            answer.cancel()
    for node, answer in asked.items():
        if answer.cancelled():
            notes.append(f"node {node} did not answer: what it has is not shown")
        else:
            inventories[node] = answer.result()
            notes += [f"node {node}: {trouble}" for trouble in inventories[node].troubles]
    runs = {shard.run for inventory in inventories.values() for shard in inventory.memory if shard.run}
    members = {run: await _members(epoch, state, run) for run in sorted({*runs, job.run})[-MAX_RUNS:]}
    found = put_together(inventories, members)
    return jobs_pb2.CheckpointsReply(job=job.id, checkpoints=found, notes=notes[:MAX_NOTES])


def _gone(epoch: LeaderEpoch, node: str) -> str:
    seen = epoch.sessions.nodes_named([node]).get(node)
    since = "" if seen is None or seen.heard_s is None else f" (last heard {time.monotonic() - seen.heard_s:.0f} s ago)"
    return f"node {node} is gone{since}: what it had in memory may be lost; what is on its disk comes back with it"


async def _members(epoch: LeaderEpoch, state: JobState, run: int) -> list[str]:
    """The node of each rank of a run; empty where nobody remembers it."""
    record = state.run
    if record is None or record.run != run:
        key = keys.run(state.job.id, run)
        entry = await epoch.ledger.store.read(key)
        record = decode(RunRecord, key, entry.value) if entry is not None else None
    return [member.node for member in record.members] if record is not None else []
