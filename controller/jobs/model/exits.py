"""Recognises how the workers of a run ended, from reports and leases, and words it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from atoll.controller.jobs.model.observed import (
    ABSENT_S,
    CANCEL_DEADLINE_S,
    PARTED_S,
    RETURN_GRACE_S,
    WORKER_DEATH_S,
    ObservedJob,
    ObservedNode,
    PassClock,
    ViewStage,
    WorkerPhase,
)
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import ExitRecord, JobPhase, Level, RunMember, RunRecord, WorkerExitKind
from atoll.jobs.worker_key import WorkerKey

EXIT_EVENTS: Final = 32
"""Ends that are told one by one: a run of thousands may end at one moment, and all is one transaction of etcd."""
_GOOD_ENDS: Final = (WorkerExitKind.FINISHED, WorkerExitKind.DRAINED, WorkerExitKind.STOPPED)


def silent_s(node: ObservedNode | None, clock: PassClock) -> float | None:
    """Return the seconds since a node's last message; None for a node from which this leader had none."""
    return None if node is None or node.last_message_s is None else clock.now_s - node.last_message_s


def is_lost(node: ObservedNode | None, clock: PassClock) -> bool:
    """Return True if a node's stream is gone and its lease expired. An unknown node first gets time to reconnect."""
    if (silence_s := silent_s(node, clock)) is None:
        return clock.now_s - clock.awaiting_since_s > max(RETURN_GRACE_S, clock.node_lease_s)
    return node is not None and not node.connected and silence_s > clock.node_lease_s


def record_exits(observed: ObservedJob, run: RunRecord, clock: PassClock) -> RunRecord:
    """The run with every end that can be told by now, in order of rank."""
    if _all_live(observed, run):
        return run
    ended = sum(m.exit is not None for m in run.members)
    members: list[RunMember] = []
    for member in run.members:
        found = None if member.exit else _exit_of(observed, run, member, clock)
        members.append(replace(member, exit=replace(found, order=ended)) if found else member)
    if all(after is before for after, before in zip(members, run.members, strict=True)):
        return run
    return replace(run, members=tuple(members))


def _all_live(observed: ObservedJob, run: RunRecord) -> bool:
    """Return True if no worker ended, as in nearly every pass over nearly every run."""
    if len(observed.workers) < len(run.members) or any(m.exit for m in run.members):
        return False
    return not any(worker.phase is WorkerPhase.EXITED for worker in observed.workers.values())


def _exit_of(observed: ObservedJob, run: RunRecord, member: RunMember, clock: PassClock) -> ExitRecord | None:
    node = observed.nodes.get(member.node)
    if node is not None and node.connected:
        worker = node.workers.get(WorkerKey(run.job, run.run, member.rank))
        if worker is not None:
            return worker.exit if worker.phase is WorkerPhase.EXITED else None
        if _is_yet_to_join(observed, member):
            return None
        return _exit_of_absent(observed, member, node)
    stopping_s = clock.now_s - observed.since_s if observed.job.status.phase is JobPhase.STOPPING else 0.0
    if observed.job.cancel and stopping_s >= CANCEL_DEADLINE_S:
        return ExitRecord(kind=WorkerExitKind.LOST, reason=f"{member.node} was not reachable to stop it")
    if _parted(observed, run, node, clock):
        return ExitRecord(kind=WorkerExitKind.LOST, reason=f"its peers lost it, and the agent of {member.node} is gone")
    if not is_lost(node, clock):
        return None
    if (silence_s := silent_s(node, clock)) is None:
        return ExitRecord(kind=WorkerExitKind.LOST, reason=f"node {member.node} did not come back to a new leader")
    if observed.job.status.phase is JobPhase.STOPPING and silence_s <= clock.node_lease_s + WORKER_DEATH_S:
        return None  # its workers die with its agent, but not at once: the devices are not free yet
    return ExitRecord(kind=WorkerExitKind.LOST, reason=f"node {member.node} is silent for {silence_s:.0f} s")


def _parted(observed: ObservedJob, run: RunRecord, node: ObservedNode | None, clock: PassClock) -> bool:
    """Return True if workers and controller have both lost the node, so its lease need not be waited for.

    If it lives, it is alone: the fence of a newer run or view rejects what it writes."""
    if node is None or node.connected or (silence_s := silent_s(node, clock)) is None or silence_s <= PARTED_S:
        return False
    if observed.job.status.phase is JobPhase.STOPPING:
        return any(m.exit is not None and m.exit.kind is WorkerExitKind.PEER_LOST for m in run.members)
    newest = observed.views.newest
    others = [observed.workers[rank] for rank in newest.ranks if rank in observed.workers] if newest is not None else []
    return bool(others) and all(
        one.view_report is not None and one.view_report.stage is ViewStage.BROKEN for one in others
    )


def _is_yet_to_join(observed: ObservedJob, member: RunMember) -> bool:
    """Return True if the worker has not joined a view yet: it is launched until its agent knows it."""
    if observed.job.status.phase is not JobPhase.RUNNING or not observed.views.kept:
        return False
    return all(member.rank not in view.ranks for view in observed.views.kept)


def _exit_of_absent(observed: ObservedJob, member: RunMember, node: ObservedNode) -> ExitRecord | None:
    """The node's agent is there and does not know the worker."""
    match observed.job.status.phase:
        case JobPhase.RUNNING:
            return ExitRecord(
                kind=WorkerExitKind.LOST, reason=f"the agent of {member.node} was restarted and has it no more"
            )
        case JobPhase.STOPPING if node.last_message_s is not None and node.last_message_s > observed.since_s + ABSENT_S:
            return ExitRecord(kind=WorkerExitKind.STOPPED, reason="it had not begun")
        case _:
            return None


def exit_events(before: RunRecord, after: RunRecord) -> Iterator[NewEvent]:
    """One for each end, the bad ones first; beyond EXIT_EVENTS of them a last one counts the rest."""
    if after is before:
        return
    both = zip(before.members, after.members, strict=True)
    ends = [(new, new.exit) for old, new in both if old.exit is None and new.exit is not None]
    if len(ends) > EXIT_EVENTS:
        ends.sort(key=lambda end: end[1].kind in _GOOD_ENDS)
    for member, exit in ends[:EXIT_EVENTS]:
        yield NewEvent(
            kind=EventKind.WORKER_ENDED,
            level=Level.INFO if exit.kind in _GOOD_ENDS else Level.WARNING,
            run=after.run,
            rank=member.rank,
            node=member.node,
            step=exit.step,
            cause=in_words(exit),
        )
    if rest := [exit.kind for _, exit in ends[EXIT_EVENTS:]]:
        counts = ", ".join(f"{rest.count(kind)} {kind.lower()}" for kind in sorted(set(rest)))
        yield NewEvent(kind=EventKind.WORKERS_ENDED, run=after.run, count=len(rest), cause=counts)


def in_words(exit: ExitRecord) -> str:
    reason = f": {exit.reason}" if exit.reason else ""
    return {
        WorkerExitKind.FINISHED: "finished",
        WorkerExitKind.DRAINED: f"stopped at a step boundary, step {exit.step}",
        WorkerExitKind.PEER_LOST: f"lost a peer at step {exit.step}{reason}",
        WorkerExitKind.FAILED: f"failed with exit code {exit.code} at step {exit.step}{reason}",
        WorkerExitKind.SIGNALLED: f"was killed at step {exit.step}{reason or f': signal {-exit.code}'}",
        WorkerExitKind.UNRESPONSIVE: f"gave no sign of life after step {exit.step}{reason}",
        WorkerExitKind.NOT_STARTED: f"could not start{reason}",
        WorkerExitKind.STOPPED: f"was stopped at the end of the grace{reason}",
        WorkerExitKind.LOST: f"was lost{reason}",
    }[exit.kind]
