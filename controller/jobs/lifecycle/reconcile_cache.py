"""Remembers the jobs that called for nothing when they were last looked at: in nearly every pass, nearly all.

What only time decides of them (growing, restarts that come back) waits for their next profile: a second at most."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.controller.jobs.admission.free_devices import FreeDevices
from atoll.controller.jobs.agents.progress import ProgressBoard, RunProgress
from atoll.controller.jobs.agents.sessions import AgentSession, AgentSessions
from atoll.controller.jobs.model.observed import JobStep
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.state.records import JobPhase
from atoll.controller.state.views import ViewState


@dataclass(frozen=True, slots=True)
class _Basis:
    """What a look at a job rested on, but for the clock and what a profile says. The records are replaced, never
    changed; `changes`: of each of `sessions` at that time."""

    records: tuple[object, ...]
    sessions: tuple[AgentSession, ...]
    changes: tuple[int, ...]
    progress: RunProgress
    told: tuple[object, ...]
    may_take: bool

    def holds(self, state: JobState, sessions: AgentSessions, progress: RunProgress | None) -> bool:
        return (
            all(a is b for a, b in zip(self.records, _records(state), strict=True))
            and progress is self.progress
            and _told(self.progress) == self.told
            and all(sessions.connected.get(one.record.name) is one for one in self.sessions)
            and tuple(one.changes for one in self.sessions) == self.changes
        )


class QuietJobs:
    """Of one leader epoch; bounded by the jobs that run."""

    def __init__(self, sessions: AgentSessions, progress: ProgressBoard) -> None:
        self._sessions = sessions
        self._progress = progress
        self._known: dict[str, _Basis] = {}

    def note(self, state: JobState, step: JobStep) -> None:
        """A job was looked at, and this is what it called for."""
        self._known.pop(state.job.id, None)
        if step.actions or step.events or step.plan is not None or not _trains_undisturbed(state):
            return
        assert state.run is not None
        assert state.seats is not None
        connected = self._sessions.connected
        sessions = tuple(connected[name] for name in state.seats.ranks if name in connected)
        progress = self._progress.of(state.job.id, state.run.run)
        if progress is None or len(sessions) < len(state.seats.ranks):
            return
        self._known[state.job.id] = _Basis(
            records=_records(state),
            sessions=sessions,
            changes=tuple(one.changes for one in sessions),
            progress=progress,
            told=_told(progress),
            may_take=state.living < state.job.spec.max_workers,
        )

    def is_quiet(self, state: JobState, free: FreeDevices) -> bool:
        """Whether the next look would find what the last one did: nothing to do."""
        known = self._known.get(state.job.id)
        if known is None or state.stale:
            return False
        if known.may_take and (free.devices or state.job.id in free.kept):
            return False
        return known.holds(state, self._sessions, self._progress.of(state.job.id, state.job.status.run))

    def forget(self, job: str) -> None:
        self._known.pop(job, None)


def _records(state: JobState) -> tuple[object, ...]:
    return state.job, state.run, state.views, state.plans, state.placement


def _told(progress: RunProgress) -> tuple[object, ...]:
    """What of a run's progress is answered to, beside its profile."""
    return progress.view, progress.workload_fingerprint, progress.state_bytes, progress.resumed, progress.stepped


def _trains_undisturbed(state: JobState) -> bool:
    """Whether nobody ended, said that something is broken, or is on a way into a view: all that has deadlines."""
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
