"""Starts a waiting job: its next run on free devices, with a first plan and a placement. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.jobs.admission.growing import learned, stood_by
from atoll.controller.jobs.lifecycle.phases import advance
from atoll.controller.jobs.lifecycle.recovery import awaited_memory, recovery_at_launch
from atoll.controller.jobs.model.connectivity import relay_notice
from atoll.controller.jobs.model.members import limited_to
from atoll.controller.jobs.model.observed import JobStep, ObservedJob, PassClock
from atoll.controller.jobs.model.policy import begun_with, expected_total
from atoll.controller.jobs.model.replica_placement import first_placement, is_same, shared_hosts, without_room
from atoll.controller.jobs.model.start import StartDecision, StartRequest, decide_start
from atoll.controller.jobs.strategy.choosing import choose_at_launch
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import (
    JobPhase,
    JobRecord,
    Level,
    PlacementRecord,
    RunRecord,
    WorkerExitKind,
)
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState
from atoll.errors import NoFeasiblePlan

_SECONDS: Final = re.compile(r"[\d.]+ s\b")


def begin_run(observed: ObservedJob, clock: PassClock) -> JobStep:
    """Begin the job's next run if its devices are free; otherwise return the job with the reason why it waits."""
    job = observed.job
    last_run = limited_to(observed.run, observed.views.newest) if observed.run else None
    wanted = StartRequest(
        min_workers=job.spec.min_workers,
        max_workers=job.spec.max_workers,
        since_s=observed.since_s,
        retry_delay_s=job.status.retry_delay_s,
        seats=tuple(Counter(m.node for m in last_run.members).items()) if last_run else (),
        survivors=_survivors(last_run),
        standby=job.learned.standby,
        learned=learned(job, observed.devices.free),
        total_batch=expected_total(job),
        stages=job.spec.stages,
    )
    decision = decide_start(clock.now_s, wanted, observed.devices.free, observed.devices.ports)
    if not decision.members:
        left_out = f"; {observed.devices.unreachable}" if observed.devices.unreachable else ""
        return JobStep(_with_reason(job, decision.reason + left_out), observed.run, held=decision.held)
    if awaited := awaited_memory(observed, last_run, clock):
        return JobStep(_with_reason(job, awaited), observed.run, held=decision.devices)
    number, nodes = job.status.run + 1, {m.node: observed.nodes[m.node].record for m in decision.members}
    run = RunRecord(
        job=job.id,
        run=number,
        members=tuple(
            replace(member, island=nodes[member.node].island, behind_nat=nodes[member.node].behind_nat)
            for member in decision.members
        ),
        master_address=nodes[decision.members[0].node].address,
        master_port=decision.master_port,
        began_unix_s=clock.unix_s,
        data_seed=observed.data_seed,
        recovery=recovery_at_launch(last_run, decision.members, clock),
    )
    job, chosen = choose_at_launch(observed, run.members)
    memory = job.learned.memory
    places = [Place(d.node, d.index, d.speed, d.work_per_s, memory.get(d.name)) for d in decision.devices]
    plan = begun_with(
        job, job.wanted_strategy, first_plan(number, job.spec.split, places, wanted.learned, wanted.total_batch)
    )
    started = advance(job, JobPhase.STARTING, decision.reason, clock.unix_s)
    started = replace(started, status=replace(started.status, run=number, view=1, retry_delay_s=0.0))
    started, left_out_events = _update_standbys(started, decision, places)
    devices = tuple(f"{m.node}/{m.device}" for m in run.members[:16])
    before, refused = observed.plans.placement, ""
    try:
        placement = first_placement(
            number,
            run.members,
            nodes,
            job.spec.checkpoint,
            before=before,
            links=observed.training.links,
            learned=job.learned,
        )
    except NoFeasiblePlan as error:
        placement, refused = None, f"no copies in memory of others' state: {error}"
    events = (
        NewEvent(kind=EventKind.STARTING, run=number, cause=decision.reason, devices=devices),
        NewEvent(kind=EventKind.PLAN_ISSUED, plan=1, planner=plan.planner, cause=plan.reason),
        *([_placement_warning(refused)] if refused else _placement_events(before, placement)),
        *(NewEvent(kind=EventKind.CONNECTIVITY, cause=text) for text in [relay_notice(run.members)] if text),
        *(
            NewEvent(kind=EventKind.CONNECTIVITY, level=Level.WARNING, cause=text)
            for text in [observed.devices.unreachable]
            if text
        ),
        *left_out_events,
        *chosen,
    )
    return JobStep(
        started, run, plan, events, placement=placement, views=(_first_view(run, job.wanted_strategy, clock),)
    )


def _first_view(run: RunRecord, strategy: str, clock: PassClock) -> ViewRecord:
    """Make the launch's view, in force once all its workers report that they train."""
    ranks = tuple(member.rank for member in run.members)
    return ViewRecord(
        job=run.job,
        run=run.run,
        view=1,
        state=ViewState.FORMING,
        cause=ViewCause.LAUNCH,
        reason=f"run {run.run} was launched",
        ranks=ranks,
        has_state=ranks,
        master_address=run.master_address,
        master_port=run.master_port,
        plan=1,
        wanted=len(ranks),
        strategy=strategy,
        proposed_unix_s=clock.unix_s,
        forming_unix_s=clock.unix_s,
    )


def _placement_events(before: PlacementRecord | None, now: PlacementRecord | None) -> Iterator[NewEvent]:
    """Yield events of a changed placement of copies; a restart on the same machines is silent."""
    if now is None:
        return
    said = set() if before is None else set(without_room(before))
    yield from (_placement_warning(text) for text in without_room(now) if text not in said)
    if before is not None and is_same(before, now):
        return
    yield NewEvent(kind=EventKind.PLACEMENT, cause=f"placement: {now.reason}")
    hosts = shared_hosts(now)
    if hosts and (before is None or shared_hosts(before) != hosts):
        text = (
            f"copies in memory lie on the host of the originals ({', '.join(hosts[:8])} and others): "
            "if that host is lost, the job resumes from disk. Use more hosts"
        )
        yield _placement_warning(text)


def _placement_warning(text: str) -> NewEvent:
    return NewEvent(kind=EventKind.PLACEMENT, level=Level.WARNING, cause=text)


def _update_standbys(
    job: JobRecord, decision: StartDecision, places: Sequence[Place]
) -> tuple[JobRecord, tuple[NewEvent, ...]]:
    """Update the job's standbys: remove those that train now, add those that the start left out."""
    trains = {place.name for place in places}
    waiting = {name: s for name, s in job.learned.standby.items() if name not in trains}
    job = replace(job, learned=replace(job.learned, standby=waiting))
    new = {name: standby for name, standby in decision.standby.items() if job.learned.standby.get(name) != standby}
    return stood_by(job, new, decision.standby)


def _survivors(run: RunRecord | None) -> frozenset[str]:
    if run is None:
        return frozenset()
    lost = {m.node for m in run.members if m.exit is not None and m.exit.kind is WorkerExitKind.LOST}
    return frozenset(m.node for m in run.members) - lost


def _with_reason(job: JobRecord, reason: str) -> JobRecord:
    """Set the job's reason, unless it differs only in seconds: counting down in etcd would be a write each pass."""
    same = _SECONDS.sub("", reason) == _SECONDS.sub("", job.status.reason)
    return job if same else replace(job, status=replace(job.status, reason=reason))
