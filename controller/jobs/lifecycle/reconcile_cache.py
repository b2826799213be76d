"""Cache of the jobs that called for nothing at the last look: in nearly every pass, nearly all.

What only time decides of them (growing, restarts that come back) waits for their next profile: a second at most."""

from __future__ import annotations

from atoll.controller.jobs.admission.free_devices import FreeDevices
from atoll.controller.jobs.agents.progress import ProgressBoard
from atoll.controller.jobs.agents.sessions import AgentSessions
from atoll.controller.jobs.model.observed import JobStep
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.state.records import JobPhase
from atoll.controller.state.views import ViewState


class QuietJobs:
    """Cache of one leader epoch, bounded by the jobs that run."""

    def __init__(self, sessions: AgentSessions, progress: ProgressBoard) -> None:
        self._sessions = sessions
        self._progress = progress
        self._known: dict[str, tuple[object, ...]] = {}

    def note(self, state: JobState, step: JobStep) -> None:
        """Remember what the last look at a job rested on, if it called for nothing."""
        self._known.pop(state.job.id, None)
        if step.actions or step.events or step.plan is not None or not _trains_undisturbed(state):
            return
        if (basis := self._basis(state)) is not None:
            self._known[state.job.id] = basis

    def is_quiet(self, state: JobState, free: FreeDevices) -> bool:
        """Return True if another look would call for nothing, as the last one did."""
        known = self._known.get(state.job.id)
        if known is None or state.stale:
            return False
        if (free.devices or state.job.id in free.kept) and state.living < state.job.spec.max_workers:
            return False
        return known == self._basis(state)

    def forget(self, job: str) -> None:
        self._known.pop(job, None)

    def _basis(self, state: JobState) -> tuple[object, ...] | None:
        """Return all that a look at a job rests on, but for the clock and its profile; None if an agent is away.

        Records, sessions and progress are replaced, never changed, except for the values that are listed beside."""
        if state.run is None or state.seats is None:
            return None
        progress = self._progress.of(state.job.id, state.run.run)
        sessions = [self._sessions.connected.get(name) for name in state.seats.ranks]
        if progress is None or None in sessions:
            return None
        records = (state.job, state.run, state.views, state.plans, state.placement)
        reported = (progress.view, progress.workload_fingerprint, progress.state_bytes, progress.script)
        changes = (session.changes for session in sessions if session is not None)
        return (*records, progress, *reported, progress.resumed, progress.stepped, *sessions, *changes)


def _trains_undisturbed(state: JobState) -> bool:
    """Return True if no worker ended, reported a break, or is about to enter a view: all that has deadlines."""
    if state.job.status.phase is not JobPhase.RUNNING or state.job.cancel or state.run is None:
        return False
    if state.broken_since_s is not None or any(member.exit is not None for member in state.run.members):
        return False
    newest = state.views[-1] if state.views else None
    if newest is None:
        return True
    return (
        newest.state is ViewState.IN_FORCE and newest.stepped_unix_s > 0 and len(newest.ranks) == len(state.run.members)
    )
