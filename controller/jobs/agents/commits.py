"""Commits: the generation in the machines' memory that counts. Workers report it; in etcd it outlives a leader.

A generation counts when all ranks have said, in the agreement of a step, that their shards are complete with the copies
that are due; each of them then tells its step. So what any of them tells is true of all.
"""

from __future__ import annotations

from typing import Final

from atoll.controller.state.records import RunRecord
from atoll.controller.state.recovery import CommitRecord

COMMIT_EVERY_S: Final = 1.0
"""Where steps are shorter, the newest of a second is written."""


def newly_complete(run: RunRecord, memory_step: int, before: CommitRecord | None, unix_s: float) -> CommitRecord | None:
    """memory_step: newest that a worker of the run told, 0 for none."""
    if memory_step == 0 or (before is not None and (before.run, before.step) >= (run.run, memory_step)):
        return None
    return CommitRecord(job=run.job, run=run.run, step=memory_step, shards=len(run.members), unix_s=unix_s)
