"""Records a job's recovery after a loss, or a resize, in its run's record as it proceeds, so that another leader finds
it. Pure.

Times are wall clocks, for they outlive controllers. They decide one thing alone: for how long the next run waits for
machines that are away and that alone hold the newest state in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.jobs.model.exits import silent_s
from atoll.controller.jobs.model.observed import ObservedJob, PassClock
from atoll.controller.jobs.model.replica_placement import copies_by_node
from atoll.controller.state.events import EventKind, NewEvent, TimedPart
from atoll.controller.state.records import Cause, ExitRecord, JobPhase, RunMember, RunRecord, WorkerExitKind
from atoll.controller.state.recovery import RecoveryRecord

MAX_NAMED: Final = 64
MIN_SHOWN_WAIT_S: Final = 0.05
"""Shorter phases of a recovery are left out of its event, but for those that every recovery has."""
MAX_MEMORY_WAIT_S: Final = 30.0
"""Longest wait for machines that alone hold the newest state in memory, in seconds."""
_MIN_MEMORY_WAIT_S: Final = 0.5
"""Less is not worth a sentence."""
RESIZES: Final = (Cause.GROW, Cause.SHRINK)
_FOLLOWED: Final = (WorkerExitKind.FINISHED, WorkerExitKind.DRAINED, WorkerExitKind.STOPPED, WorkerExitKind.PEER_LOST)
"""How workers end that are not lost themselves."""


def recovery_at_fence(
    observed: ObservedJob, run: RunRecord, cause: Cause, text: str, clock: PassClock
) -> RecoveryRecord | None:
    """Return the recovery of a run that is fenced. A loss before the first step is part of the same recovery; a
    cancelled job has none."""
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
    """Return the recovery of a run of which no process is left. text: the cause, empty if no worker is to blame."""
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
    """Return the recovery that the next run's record begins with."""
    if before is None or before.recovery is None or before.recovery.over:
        return None
    had = {member.node for member in before.members}
    new = dict.fromkeys(member.node for member in members if member.node not in had)
    joined = _named(before.recovery.joined, list(new))
    return replace(before.recovery, launched_unix_s=clock.unix_s, joined=joined)


def close_recovery(observed: ObservedJob, run: RunRecord, clock: PassClock) -> tuple[RunRecord, tuple[NewEvent, ...]]:
    """Close the run's recovery once its first step was reported. Return the run and the event."""
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
    """Return True if the run completed a step, or runs a script that reports no steps."""
    reports = observed.training.batch_size or observed.job.learned.initial_batch
    return observed.training.stepped or (observed.job.status.phase is not JobPhase.STARTING and not reports)


def _lost(run: RunRecord) -> list[str]:
    bad = (m for m in run.members if m.exit is not None and m.exit.kind not in _FOLLOWED)
    return [f"rank {member.rank} on {member.node}" for member in bad]


def _reached(observed: ObservedJob, run: RunRecord) -> int:
    """Return the steps that the run is known to have done."""
    steps = [member.exit.step for member in run.members if member.exit]
    steps += [w.step for node in observed.nodes.values() for key, w in node.workers.items() if key.run == run.run]
    return max([*steps, observed.training.newest_step + 1 if observed.training.stepped else 0])


def _last_seen(observed: ObservedJob, run: RunRecord, latest_unix_s: float, clock: PassClock) -> float:
    """Return the time of the last message of a lost node; `latest_unix_s` if this leader received none."""
    silent = [
        silence_s
        for member in run.members
        if _is_loss_of_node(member.exit) and (silence_s := silent_s(observed.nodes.get(member.node), clock)) is not None
    ]
    return min(latest_unix_s, clock.unix_s - max(silent)) if silent else latest_unix_s


def _is_loss_of_node(exit: ExitRecord | None) -> bool:
    return exit is not None and exit.kind is WorkerExitKind.LOST


def _named(before: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*before, *new)))[:MAX_NAMED]


def awaited_memory(observed: ObservedJob, last_run: RunRecord | None, clock: PassClock) -> str:
    """Return the reason to wait for a machine's memory; empty if the job does not wait for one.

    An agent that comes back serves the state that its machine's memory held. Without it the run resumes from the disk.
    So the wait lasts as long as training those steps again would take, MAX_MEMORY_WAIT_S at most: it at most doubles
    what the loss costs.
    """
    if last_run is None or last_run.recovery is None or last_run.recovery.over:
        return ""
    at_stake = observed.training.memory_step - observed.job.status.checkpoint_step
    left_s = min(_redo_s(last_run, last_run.recovery, at_stake), MAX_MEMORY_WAIT_S) - (clock.now_s - observed.since_s)
    if left_s < _MIN_MEMORY_WAIT_S or not (away := _hold_alone(observed, last_run)):
        return ""
    who = ", ".join(away[:8])
    return (
        f"waiting {left_s:.0f} s for {who} to come back, whose memory alone has a part of step "
        f"{observed.training.memory_step}; else {at_stake} steps are trained again"
    )


def _redo_s(run: RunRecord, recovery: RecoveryRecord, steps: int) -> float:
    """Return the time that the run took for so many steps, its start included."""
    done = max(recovery.reached_step - recovery.began_step, 1)
    return max(recovery.seen_unix_s - run.began_unix_s, 0.0) * min(max(steps, 0) / done, 1.0)


def _hold_alone(observed: ObservedJob, last_run: RunRecord) -> list[str]:
    """Return the nodes of the last run that are away and whose state no connected node holds."""
    placement = observed.plans.placement
    copies = copies_by_node(placement) if placement is not None and placement.run == last_run.run else {}
    connected = {name: node for name, node in observed.nodes.items() if node.connected}
    here = {name for name, node in connected.items() if observed.job.id in node.memory_jobs}
    owners = dict.fromkeys(member.node for member in last_run.members)
    return [node for node in owners if node not in connected and here.isdisjoint(copies.get(node, (node,)))]
