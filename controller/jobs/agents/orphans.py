"""Orphans: workers of older runs, of ended or unknown jobs, of other nodes; checkpoints in memory of jobs that will not
come back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from atoll.controller.jobs.lifecycle.observed import (
    Action,
    DropMemory,
    ForgetWorker,
    ObservedNode,
    StopRun,
    WorkerPhase,
)
from atoll.controller.state.records import JobPhase, JobRecord, RunRecord
from atoll.worker_key import WorkerKey

ORPHAN_GRACE_S = 2.0


def is_orphan(node: str, key: WorkerKey, job: JobRecord | None, run: RunRecord | None) -> bool:
    """Whether a worker that `node` reports belongs to no run that holds devices."""
    if job is None or run is None or not job.status.phase.active or key.run != run.run:
        return True
    return key.rank >= len(run.members) or run.members[key.rank].node != node


def orphan_actions(
    nodes: Mapping[str, ObservedNode],
    jobs: Mapping[str, tuple[JobRecord, RunRecord | None]],
    unreadable: Collection[str],
) -> Iterator[Action]:
    """Stop orphans that live, forget those that ended, drop what is left of jobs. Jobs whose records cannot be read are
    left alone."""
    for name in sorted(nodes):
        if not nodes[name].connected:
            continue
        for key, worker in nodes[name].workers.items():
            job, run = jobs.get(key.job, (None, None))
            if key.job in unreadable or not is_orphan(name, key, job, run):
                continue
            if worker.phase is WorkerPhase.EXITED:
                yield ForgetWorker(name, key)
            else:
                yield StopRun(name, key.job, key.run, ORPHAN_GRACE_S, _why(job))
        for kept in sorted(nodes[name].memory_jobs):
            job, _ = jobs.get(kept, (None, None))
            if kept not in unreadable and (job is None or job.status.phase.ended):
                yield DropMemory(name, kept)


def _why(job: JobRecord | None) -> str:
    if job is None:
        return "the controller knows no such job"
    if job.status.phase is JobPhase.CANCELLED:
        return "cancelled"
    return (
        f"its run is over; the job is {job.status.phase.lower()}"
        if job.status.phase.ended
        else "a newer run replaces it"
    )
