"""JobService.Remove: first what nodes and object store have of a job, then the job. May be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch
from atoll.controller.services.inventory import MAX_NOTES, NodesInventory, take
from atoll.errors import Conflict
from atoll.v1 import jobs_pb2

REMOVE_ANSWER_S: Final = 75.0
"""An agent gives an object store 60 s."""
_SHOWN: Final = 4


async def remove(epoch: LeaderEpoch, name: str, *, keep_checkpoints: bool, by: str) -> jobs_pb2.RemoveReply:
    """by: who asked for it. Raises NotFound, Conflict."""
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
