"""Records a job's recovery after a loss, or a resize, in its run's record as it proceeds: another leader finds it
there. Pure.

Times are wall clocks, for they outlive controllers; nothing is decided by them but how long a machine's memory is worth
waiting for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.jobs.model.exits import silent_s
from atoll.controller.jobs.model.observed import ObservedJob, PassClock
from atoll.controller.state.events import EventKind, NewEvent, TimedPart
from atoll.controller.state.records import Cause, ExitRecord, JobPhase, RunMember, RunRecord, WorkerExitKind
from atoll.controller.state.recovery import RecoveryRecord

MOST_NAMED: Final = 64
MIN_SHOWN_WAIT_S: Final = 0.05
"""Shorter phases of a recovery are left out of its event, but for those that every recovery has."""
RESIZES: Final = (Cause.GROW, Cause.SHRINK)
_FOLLOWED: Final = (WorkerExitKind.FINISHED, WorkerExitKind.DRAINED, WorkerExitKind.STOPPED, WorkerExitKind.PEER_LOST)
"""How workers end that are not lost themselves."""


def recovery_at_fence(
    observed: ObservedJob, run: RunRecord, cause: Cause, text: str, clock: PassClock
) -> RecoveryRecord | None:
    """What the record says from now on, as the run is fenced. A loss before the first step is part of the same
    recovery; a cancelled job has none."""
    before = run.recovery
    if before is not None and not before.over and not _trained(observed):
        lost = _named(before.lost, _lost(run))
        resize = before.resize and cause in RESIZES
        return replace(before, lost=lost, resize=resize, ended_unix_s=0.0, launched_unix_s=0.0)
    if cause is Cause.CANCEL:
        return None
    return RecoveryRecord(
        run=run.run,
        cause=text,
        lost=_named((), _lost(run)),
        began_step=observed.training.resumed[1] if observed.training.resumed else 0,
        reached_step=_reached(observed, run),
        seen_unix_s=_last_seen(observed, run, clock.unix_s, clock),
        detected_unix_s=clock.unix_s,
        resize=cause in RESIZES,
    )


def recovery_at_end(observed: ObservedJob, run: RunRecord, text: str, clock: PassClock) -> RecoveryRecord | None:
    """No process of the run is left: who is to blame is known by now. text: the cause, empty where nobody is."""
    recovery = run.recovery
    if recovery is None or recovery.over:
        return recovery
    lost = _named(recovery.lost, _lost(run))
    resize = recovery.resize and not lost
    recovery = replace(recovery, ended_unix_s=clock.unix_s, lost=lost, resize=resize)
    if recovery.run != run.run:
        return recovery
    return replace(
        recovery,
        cause=recovery.cause if resize else text or recovery.cause,
        reached_step=max(recovery.reached_step, _reached(observed, run)),
        seen_unix_s=_last_seen(observed, run, recovery.seen_unix_s, clock),
    )


def recovery_at_launch(
    before: RunRecord | None, members: Iterable[RunMember], clock: PassClock
) -> RecoveryRecord | None:
    """What the next run's record begins with."""
    if before is None or before.recovery is None or before.recovery.over:
        return None
    had = {member.node for member in before.members}
    new = dict.fromkeys(member.node for member in members if member.node not in had)
    joined = _named(before.recovery.joined, list(new))
    return replace(before.recovery, launched_unix_s=clock.unix_s, joined=joined)


def close_recovery(observed: ObservedJob, run: RunRecord, clock: PassClock) -> tuple[RunRecord, tuple[NewEvent, ...]]:
    """The run with its recovery closed, once its first step was heard of, and the event that reports it."""
    recovery = run.recovery
    if recovery is None or recovery.over or observed.training.resumed is None or not observed.training.stepped:
        return run, ()
    if observed.job.status.phase is not JobPhase.RUNNING or recovery.run == run.run:
        return run, ()  # it is this run that is lost
    tier, step = observed.training.resumed
    recovery = replace(recovery, resumed_unix_s=clock.unix_s, tier=tier, step=step)
    return replace(run, recovery=recovery), (recovery_event(recovery),)


def recovery_event(recovery: RecoveryRecord) -> NewEvent:
    """Return the event of a recovery, or a resize, that is over."""
    times = (
        ("detecting", recovery.detected_unix_s - recovery.seen_unix_s),
        ("ending", recovery.ended_unix_s - recovery.detected_unix_s),
        ("waiting for devices", recovery.launched_unix_s - recovery.ended_unix_s),
        ("starting", recovery.resumed_unix_s - recovery.launched_unix_s),
    )
    always = ("ending", "starting") if recovery.resize else ("detecting", "ending", "starting")
    shown = (TimedPart(name, seconds) for name, seconds in times if name in always or seconds >= MIN_SHOWN_WAIT_S)
    unknown = recovery.reached_step < recovery.step  # the nodes that knew the run's steps were lost as well
    return NewEvent(
        kind=EventKind.RESIZED if recovery.resize else EventKind.RECOVERED,
        cause=recovery.cause,
        tier=recovery.tier,
        step=recovery.step,
        steps_lost=None if unknown else recovery.steps_lost,
        lost=recovery.lost,
        joined=recovery.joined,
        total_s=recovery.resumed_unix_s - recovery.seen_unix_s,
        parts=tuple(shown),
    )


def _trained(observed: ObservedJob) -> bool:
    """Whether the run came as far as a step, or is one of a script whose steps nobody hears of."""
    told = observed.training.batch_size or observed.job.learned.initial_batch
    return observed.training.stepped or (observed.job.status.phase is not JobPhase.STARTING and not told)


def _lost(run: RunRecord) -> list[str]:
    bad = (m for m in run.members if m.exit is not None and m.exit.kind not in _FOLLOWED)
    return [f"rank {member.rank} on {member.node}" for member in bad]


def _reached(observed: ObservedJob, run: RunRecord) -> int:
    """Steps that the run is known to have done."""
    told = [member.exit.step for member in run.members if member.exit]
    told += [w.step for node in observed.nodes.values() for key, w in node.workers.items() if key.run == run.run]
    return max([*told, observed.training.newest_step + 1 if observed.training.stepped else 0])


def _last_seen(observed: ObservedJob, run: RunRecord, latest_unix_s: float, clock: PassClock) -> float:
    """The last sign of life of a node that was lost; `latest_unix_s` where there is none, or none that this leader
    heard."""
    silent = [
        silence_s
        for member in run.members
        if _is_loss_of_node(member.exit) and (silence_s := silent_s(observed.nodes.get(member.node), clock)) is not None
    ]
    return min(latest_unix_s, clock.unix_s - max(silent)) if silent else latest_unix_s


def _is_loss_of_node(exit: ExitRecord | None) -> bool:
    return exit is not None and exit.kind is WorkerExitKind.LOST


def _named(before: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*before, *new)))[:MOST_NAMED]
