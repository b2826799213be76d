"""How the workers of a run ended, as far as reports and leases tell. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.controller.jobs.seen import (
    ABSENT_S,
    CANCEL_DEADLINE_S,
    PARTED_S,
    RETURN_GRACE_S,
    WORKER_DEATH_S,
    Alive,
    Seen,
    SeenNode,
    Telling,
    WorkerKey,
)
from atoll.controller.state.records import Exit, ExitKind, Member, Phase, RunRecord


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
