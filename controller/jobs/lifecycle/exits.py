"""How the workers of a run ended, as far as reports and leases tell, and the words for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from atoll.controller.jobs.lifecycle.observed import (
    ABSENT_S,
    CANCEL_DEADLINE_S,
    PARTED_S,
    RETURN_GRACE_S,
    WORKER_DEATH_S,
    Alive,
    NewEvent,
    Seen,
    SeenNode,
    Telling,
    WorkerKey,
)
from atoll.controller.state.records import Exit, ExitKind, Level, Member, Phase, RunRecord

EXIT_EVENTS: Final = 32
"""Ends that are told one by one: a run of thousands may end at one moment, and all is one transaction of etcd."""
_GOOD_ENDS: Final = (ExitKind.FINISHED, ExitKind.DRAINED, ExitKind.STOPPED)


def silent_s(node: SeenNode | None, clock: Telling) -> float:
    """How long a node without a stream has been silent; one never heard of counts from when this leader began."""
    if node is None or node.heard_s is None:
        return clock.now_s - clock.leading_since_s
    return clock.now_s - node.heard_s


def is_lost(node: SeenNode | None, clock: Telling) -> bool:
    """Whether a node's stream is gone and its lease ran out. Agents get time to come back to a new leader."""
    if node is not None and node.connected:
        return False
    if silent_s(node, clock) <= clock.node_lease_s:
        return False
    heard_by_us = node is not None and node.heard_s is not None
    return heard_by_us or clock.now_s - clock.leading_since_s > RETURN_GRACE_S


def record_exits(seen: Seen, run: RunRecord, clock: Telling) -> RunRecord:
    """The run with every end that can be told by now, in order of rank."""
    ended = sum(m.exit is not None for m in run.members)
    members: list[Member] = []
    for member in run.members:
        found = None if member.exit else _exit_of(seen, run, member, clock)
        members.append(replace(member, exit=replace(found, order=ended)) if found else member)
    if all(after is before for after, before in zip(members, run.members, strict=True)):
        return run
    return replace(run, members=tuple(members))


def _exit_of(seen: Seen, run: RunRecord, member: Member, clock: Telling) -> Exit | None:
    node = seen.nodes.get(member.node)
    if node is not None and node.connected:
        worker = node.workers.get(WorkerKey(run.job, run.run, member.rank))
        if worker is not None:
            return worker.exit if worker.alive is Alive.EXITED else None
        return _exit_of_absent(seen, member, node)
    stopping_s = clock.now_s - seen.since_s if seen.job.phase is Phase.STOPPING else 0.0
    if seen.job.cancel and stopping_s >= CANCEL_DEADLINE_S:
        return Exit(kind=ExitKind.LOST, reason=f"{member.node} was not reachable to stop it")
    if _parted(seen, run, node, clock):
        return Exit(kind=ExitKind.LOST, reason=f"its peers lost it, and the agent of {member.node} is gone")
    if not is_lost(node, clock):
        return None
    if seen.job.phase is Phase.STOPPING and silent_s(node, clock) <= clock.node_lease_s + WORKER_DEATH_S:
        return None  # its workers die with its agent, but not at once: the devices are not free yet
    return Exit(kind=ExitKind.LOST, reason=f"node {member.node} is silent for {silent_s(node, clock):.0f} s")


def _parted(seen: Seen, run: RunRecord, node: SeenNode | None, clock: Telling) -> bool:
    """Whether a fenced run need not wait for a lease: its workers and the controller have lost the node alike. Should
    it live, it is alone, and a newer run's fence keeps what it writes apart."""
    if seen.job.phase is not Phase.STOPPING or node is None or node.heard_s is None:
        return False
    peers_noticed = any(m.exit is not None and m.exit.kind is ExitKind.PEER_LOST for m in run.members)
    return peers_noticed and silent_s(node, clock) > PARTED_S


def _exit_of_absent(seen: Seen, member: Member, node: SeenNode) -> Exit | None:
    """The node's agent is there and does not know the worker."""
    match seen.job.phase:
        case Phase.RUNNING:
            return Exit(kind=ExitKind.LOST, reason=f"the agent of {member.node} was restarted and has it no more")
        case Phase.STOPPING if node.heard_s is not None and node.heard_s > seen.since_s + ABSENT_S:
            return Exit(kind=ExitKind.STOPPED, reason="it had not begun")
        case _:
            return None


def exit_events(before: RunRecord, after: RunRecord) -> Iterator[NewEvent]:
    """One for each end, the bad ones first; beyond EXIT_EVENTS of them a last one counts the rest."""
    both = zip(before.members, after.members, strict=True)
    ends = [(new, new.exit) for old, new in both if old.exit is None and new.exit is not None]
    if len(ends) > EXIT_EVENTS:
        ends.sort(key=lambda end: end[1].kind in _GOOD_ENDS)
    for member, exit in ends[:EXIT_EVENTS]:
        text = f"run {after.run}: rank {member.rank} on {member.node} {in_words(exit)}"
        yield NewEvent(Level.INFO if exit.kind in _GOOD_ENDS else Level.WARNING, "worker", text)
    if rest := [exit.kind for _, exit in ends[EXIT_EVENTS:]]:
        counts = ", ".join(f"{rest.count(kind)} {kind.lower()}" for kind in sorted(set(rest)))
        yield NewEvent(Level.INFO, "worker", f"run {after.run}: {len(rest)} more workers ended: {counts}")


def in_words(exit: Exit) -> str:
    said = f": {exit.reason}" if exit.reason else ""
    return {
        ExitKind.FINISHED: "finished",
        ExitKind.DRAINED: f"stopped at a step boundary, step {exit.step}",
        ExitKind.PEER_LOST: f"lost a peer at step {exit.step}{said}",
        ExitKind.FAILED: f"failed with exit code {exit.code} at step {exit.step}{said}",
        ExitKind.SIGNALLED: f"was killed at step {exit.step}{said or f': signal {-exit.code}'}",
        ExitKind.UNRESPONSIVE: f"gave no sign of life after step {exit.step}{said}",
        ExitKind.NOT_STARTED: f"could not start{said}",
        ExitKind.STOPPED: f"was stopped at the end of the grace{said}",
        ExitKind.LOST: f"was lost{said}",
    }[exit.kind]
