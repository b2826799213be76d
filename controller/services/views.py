"""Puts records, reports and progress together as the messages that users are shown."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Final

from google.protobuf.message import Message

from atoll.controller.jobs.agents.progress import RunProgress
from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch
from atoll.controller.jobs.model.members import joiners, members_of
from atoll.controller.jobs.model.observed import ObservedNode
from atoll.controller.jobs.model.policy import pins_of
from atoll.controller.jobs.model.strategy_in_force import last_change
from atoll.controller.jobs.records import wire
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.state.records import (
    AdmissionRecord,
    JobPhase,
    JobRecord,
    PlacementRecord,
    PlanRecord,
    RunMember,
)
from atoll.controller.state.views import ViewCause
from atoll.jobs import job_spec
from atoll.jobs.worker_key import WorkerKey
from atoll.strategies.declaration import as_json
from atoll.v1 import common_pb2, jobs_pb2

MAX_PLANS_BYTES: Final = 3 * 1024 * 1024
MAX_NODE_LINKS: Final = 64
"""Most measured links that a node is listed with: messages are limited."""
MAX_LINKS: Final = 4096
"""Most links of all workers of a job together: messages are limited."""
_PHASES: Final = {phase: jobs_pb2.Phase.Value(f"PHASE_{phase}") for phase in JobPhase}


def job_to_wire(epoch: LeaderEpoch, state: JobState) -> jobs_pb2.Job:
    """A job with its current run, as it is known at this moment."""
    job, run = state.job, state.run
    progress = epoch.progress.of(job.id, job.status.run)
    fields = wire.shared_fields(jobs_pb2.Job, job.status) | wire.shared_fields(jobs_pb2.Job, job)
    fields.update(
        spec=job_spec.to_wire(job.spec),
        phase=_PHASES[job.status.phase],
        reason=_reason(job),
        workers=_workers(epoch, state) if run else (),
        progress=progress.to_wire(time.monotonic()) if progress else None,
        plan=wire.plan_to_wire(state.plans[-1]) if state.plans else None,
        checkpoint_step=max(job.status.checkpoint_step, progress.checkpoint_step if progress else 0),
        memory_step=state.commit.step if state.commit else job.status.memory_step,
        pins=jobs_pb2.Pins(
            strategy_params=as_json(job.pinned.strategy_params),
            total_batch=job.pinned.total_batch,
            shares=pins_of(job, state.strategy).shares,
            strategy=job.pinned.strategy,
        ),
        strategy=state.strategy,
        strategy_settings=as_json(job.settings_of(state.strategy)),
        strategy_reason=last_change(job, state.views),
        standby=[*_kept_free(epoch, job.id), *_standby(epoch, state)],
        recovery=jobs_pb2.Recovery(**wire.shared_fields(jobs_pb2.Recovery, run.recovery))
        if run and run.recovery
        else None,
        membership=_membership(state),
    )
    return jobs_pb2.Job(**fields)


def _reason(job: JobRecord) -> str:
    """Return the reason of the job's phase; while it trains, also the advice that one island would be faster."""
    advice = job.learned.one_island if job.status.phase is JobPhase.RUNNING else None
    return job.status.reason if advice is None else f"{job.status.reason}; {advice.reason}"


def plans_to_wire(
    progress: RunProgress | None,
    plans: Sequence[PlanRecord],
    placement: PlacementRecord | None,
    admissions: Sequence[AdmissionRecord],
) -> jobs_pb2.PlansReply:
    """A run's placement, its newest plans, as many as a message holds, and of its admissions those that still fit."""
    reply, bytes_left = jobs_pb2.PlansReply(), MAX_PLANS_BYTES
    if placement is not None:
        reply.placement.CopyFrom(jobs_pb2.DecidedPlacement(**wire.shared_fields(jobs_pb2.DecidedPlacement, placement)))
        bytes_left -= reply.placement.ByteSize()
    decided = (
        jobs_pb2.DecidedPlan(
            plan=wire.plan_to_wire(plan),
            input=plan.input,
            output=plan.output,
            measured_step_s=progress.measured_s(plan.id) if progress else 0.0,
        )
        for plan in reversed(plans)
    )
    bytes_left = _insert_newest(reply.plans, decided, bytes_left)
    kind = jobs_pb2.DecidedAdmission
    newest = (kind(**wire.shared_fields(kind, record)) for record in reversed(admissions))
    _insert_newest(reply.admissions, newest, bytes_left)
    return reply


def _insert_newest(kept: Any, newest: Iterable[Message], bytes_left: int) -> int:
    """Insert messages, the newest first, while they fit. Return the bytes that are left."""
    for message in newest:
        bytes_left -= message.ByteSize()
        if bytes_left < 0:
            break
        kept.insert(0, message)
    return bytes_left


def _kept_free(epoch: LeaderEpoch, job: str) -> list[jobs_pb2.Standby]:
    """Devices that no other job gets, as this one asked for standbys."""
    kept = epoch.reconciler.kept_free.get(job, ())
    return [jobs_pb2.Standby(node=d.node, device=d.index, reason="kept to take over a lost one") for d in kept]


def _standby(epoch: LeaderEpoch, state: JobState) -> list[jobs_pb2.Standby]:
    """Devices that are there and wait. A job that is over has none, nor one that takes no more workers."""
    job = state.job
    members = _present(state) if job.status.phase.active else []
    trains = {f"{member.node}/{member.device}" for member in members}
    if job.status.phase.ended or len(trains) >= job.spec.max_workers:
        return []
    waiting = []
    for name, standby in sorted(job.learned.standby.items()):
        node, _, device = name.rpartition("/")
        if name not in trains and node in epoch.sessions.connected:
            waiting.append(jobs_pb2.Standby(node=node, device=int(device), reason=standby.reason))
    return waiting


def _membership(state: JobState) -> str:
    newest = state.views[-1] if state.views and state.job.status.phase.active else None
    if newest is None or newest.cause is ViewCause.LAUNCH:
        return ""
    return f"{newest.state.lower().replace('_', ' ')}, {len(newest.ranks)} workers: {newest.reason}"


def _present(state: JobState) -> list[RunMember]:
    """The members of the newest view by position, then those who are to join it."""
    if state.run is None:
        return []
    newest = state.views[-1] if state.views else None
    return [*members_of(state.run, newest), *(joiners(state.run, newest) if newest is not None else ())]


def _workers(epoch: LeaderEpoch, state: JobState) -> list[jobs_pb2.WorkerView]:
    run = state.run
    assert run is not None
    progress = epoch.progress.of(run.job, run.run)
    newest, members = state.views[-1] if state.views else None, _present(state)
    positions = {member.rank: position for position, member in enumerate(members_of(run, newest))}
    shares = state.plans[-1].shares if state.plans else (1.0,) * len(positions)
    total = sum(shares)
    views, links_left = [], MAX_LINKS
    for member in members:
        position = positions.get(member.rank)
        key = WorkerKey(run.job, run.run, member.rank)
        if member.exit:
            status = wire.exit_to_wire(key, member.exit)
        else:
            known = epoch.sessions.status(member.node, key)
            status = known or common_pb2.WorkerStatus(id=key.to_wire())
        rank = progress.ranks.get(progress.positions.get(member.rank, -1)) if progress else None
        links = sorted(rank.links.values(), key=lambda link: link.peer)[:links_left] if rank else []
        links_left -= len(links)
        fields = wire.shared_fields(jobs_pb2.WorkerView, member)
        fields.update(
            status=status,
            share=shares[position] / total if position is not None else 0.0,
            last=rank.last if rank else None,
            links=links,
            dropped_steps=rank.dropped_steps if rank else 0,
            island=member.island or member.node,
        )
        views.append(jobs_pb2.WorkerView(**fields))
    return views


def node_to_wire(epoch: LeaderEpoch, node: ObservedNode) -> jobs_pb2.Node:
    now_s = time.monotonic()
    session = epoch.sessions.connected.get(node.record.name)
    fields = wire.shared_fields(jobs_pb2.Node, node.record)
    fields.update(
        devices=[common_pb2.Device(**asdict(device)) for device in node.record.devices],
        connected=node.connected,
        seen_s_ago=now_s
        - (node.last_message_s if node.last_message_s is not None else epoch.sessions.awaiting_since_s),
        workers=session.statuses.values() if session else (),
        samples=session.samples if session else (),
        links=[
            jobs_pb2.NodeLink(node=other, **asdict(link))
            for other, link in islice(epoch.links.links_of(node.record.name).items(), MAX_NODE_LINKS)
        ],
        island_reason=node.record.island_reason or epoch.links.trouble_of(node.record.name),
    )
    return jobs_pb2.Node(**fields)
