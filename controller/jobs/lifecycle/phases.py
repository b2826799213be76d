"""The phases of a job, every legal transition between them, and what causes each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from atoll.controller.state.records import JobPhase, JobRecord, PhaseChange
from atoll.errors import AtollError

# Every legal edge, and what causes it. An edge that is missing here is a bug, not a race to tolerate.
EDGES: Final[Mapping[tuple[JobPhase, JobPhase], str]] = {
    (JobPhase.QUEUED, JobPhase.STARTING): "devices were chosen; the run with the next number is in etcd",
    (JobPhase.QUEUED, JobPhase.CANCELLED): "cancelled before a run began",
    (JobPhase.STARTING, JobPhase.RUNNING): "every worker of the run is alive, or ended already",
    (
        JobPhase.STARTING,
        JobPhase.STOPPING,
    ): "a worker could not start or was late, a node was lost, or it was cancelled",
    (JobPhase.RUNNING, JobPhase.DONE): "every rank finished",
    (
        JobPhase.RUNNING,
        JobPhase.STOPPING,
    ): "a worker was lost or failed, other devices suit it better, or it was cancelled",
    (JobPhase.STOPPING, JobPhase.QUEUED): "no process of the fenced run is left; the job goes on with the next run",
    (JobPhase.STOPPING, JobPhase.DONE): "none is left, and every rank had finished before the stop reached it",
    (JobPhase.STOPPING, JobPhase.FAILED): "none is left; another try would not help, or the restarts are used up",
    (JobPhase.STOPPING, JobPhase.CANCELLED): "none is left that can be reached within 5 s; it was cancelled",
}  # DONE, FAILED and CANCELLED have no way out: a resubmitted job is a new job

KEPT_CHANGES: Final = 64


class IllegalTransition(AtollError):
    """A transition that EDGES does not have: a bug in the reconciler."""

    def __init__(self, job: JobRecord, after: JobPhase) -> None:
        story = "; ".join(f"{c.before} -> {c.after} ({c.cause})" for c in job.status.history) or "none"
        super().__init__(f"job {job.id} may not go from {job.status.phase} to {after}. Its history: {story}")


def advance(job: JobRecord, after: JobPhase, reason: str, unix_s: float) -> JobRecord:
    """The job in its next phase. Raises IllegalTransition."""
    if (job.status.phase, after) not in EDGES:
        raise IllegalTransition(job, after)
    change = PhaseChange(before=job.status.phase, after=after, cause=reason, unix_s=unix_s)
    status = replace(
        job.status,
        phase=after,
        reason=reason,
        ended_unix_s=unix_s if after.ended else 0.0,
        history=(*job.status.history, change)[-KEPT_CHANGES:],
    )
    return replace(job, status=status)
