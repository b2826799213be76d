"""Orphans: workers of older runs, of ended or unknown jobs, of other nodes; checkpoints in memory of jobs that will not
come back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from atoll.controller.jobs.model.observed import (
    Action,
    DropMemory,
    ForgetWorker,
    ObservedNode,
    StopRun,
    WorkerPhase,
)
from atoll.controller.state.records import JobPhase, JobRecord, RunRecord
from atoll.jobs.worker_key import WorkerKey

ORPHAN_GRACE_S = 2.0


def orphans_of(node: str, workers: Iterable[WorkerKey], runs: Mapping[str, RunRecord]) -> Iterator[WorkerKey]:
    """Yield workers that `node` reports and that belong to no run that holds devices."""
    for key in workers:
        job, number, rank = key
        run = runs.get(job)
        if run is None or number != run.run or rank >= len(run.members) or run.members[rank].node != node:
            yield key


def orphan_actions(
    nodes: Mapping[str, ObservedNode],
    jobs: Mapping[str, tuple[JobRecord, RunRecord | None]],
    unreadable: Collection[str],
) -> Iterator[Action]:
    """Stop orphans that live, forget those that ended, drop what is left of jobs. Jobs whose records cannot be read are
    left alone."""
    runs = {job.id: run for job, run in jobs.values() if run is not None and job.status.phase.active}
    for name in sorted(nodes):
        if not nodes[name].connected:
            continue
        for key in orphans_of(name, nodes[name].workers, runs):
            if key.job in unreadable:
                continue
            job, _ = jobs.get(key.job, (None, None))
            if nodes[name].workers[key].phase is WorkerPhase.EXITED:
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
