"""Decides what one job needs now: wanted against observed. Pure; may be asked any number of times.

How a waiting job is started is in launching.py, what nodes are asked to do in orders.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from atoll.controller.deciding.given import Given
from atoll.controller.deciding.next import next_plan
from atoll.controller.jobs.admission.growing import DeviceAssessment, assess_devices
from atoll.controller.jobs.admission.one_island import advise
from atoll.controller.jobs.admission.thin_island import without_thin_island
from atoll.controller.jobs.lifecycle import orders
from atoll.controller.jobs.lifecycle.launching import begin_run
from atoll.controller.jobs.lifecycle.phases import advance
from atoll.controller.jobs.lifecycle.recovery import close_recovery, recovery_at_end, recovery_at_fence
from atoll.controller.jobs.membership import joining
from atoll.controller.jobs.membership.life import move_view
from atoll.controller.jobs.membership.next_view import left_out, next_view
from atoll.controller.jobs.membership.proposing import ViewStep
from atoll.controller.jobs.model.connectivity import with_measured_islands
from atoll.controller.jobs.model.device_memory import UNKNOWN, name_of, with_overflows
from atoll.controller.jobs.model.exits import exit_events, in_words, record_exits
from atoll.controller.jobs.model.failures import (
    GOOD_RUN_S,
    finished_text,
    has_recovered,
    judge,
    left_early_text,
    root_cause,
    start_deadline_s,
)
from atoll.controller.jobs.model.members import by_position, joiners, limited_to, members_of
from atoll.controller.jobs.model.observed import (
    LEFT_EARLY_S,
    JobStep,
    ObservedJob,
    PassClock,
    WorkerPhase,
)
from atoll.controller.jobs.model.offline_profile import offline_profile
from atoll.controller.jobs.model.policy import policy_of, with_learned
from atoll.controller.jobs.strategy.choosing import revise
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import (
    AdmissionRecord,
    Cause,
    JobPhase,
    JobRecord,
    Level,
    PlanRecord,
    RunRecord,
    WorkerExitKind,
)
from atoll.controller.state.views import ViewCause, ViewState
from atoll.errors import BadInput, NoFeasiblePlan

LOST_GRACE_S: Final = 3.0
GRACE_S: Final[Mapping[Cause, float]] = {Cause.GROW: 10.0, Cause.SHRINK: 10.0, Cause.CANCEL: 2.0}
"""Default time to reach a step boundary, in seconds. After a loss there is none to reach."""
PLAIN_GRACE_S: Final = 28.0
"""Same for scripts without Atoll, which get SIGTERM: with the time that an agent adds, 30 s as from torchrun."""


def next_step(observed: ObservedJob, clock: PassClock) -> JobStep:
    """Return at most one transition of one job, and the actions that its present phase calls for."""
    job = observed.job
    if job.status.phase is JobPhase.QUEUED:
        return _queued(observed, clock)
    if not job.status.phase.active or observed.run is None:
        return JobStep(job, observed.run)
    run = record_exits(observed, observed.run, clock)
    events = tuple(exit_events(observed.run, run))
    observed, overflows = _overflowed(observed, run)
    run, recovered = close_recovery(observed, run, clock)
    observed, refused = _recognised(observed)
    observed, advised = advise(observed, run, clock)
    choice = revise(observed, run, clock)
    observed = replace(observed, job=choice.job)
    step = {JobPhase.STARTING: _starting, JobPhase.RUNNING: _running, JobPhase.STOPPING: _stopping}[job.status.phase](
        observed, run, clock
    )
    return replace(
        step,
        events=(*events, *overflows, *recovered, *refused, *advised, *choice.events, *step.events),
        decisions=(*choice.decisions, *step.decisions),
        actions=(*orders.forgets(observed), *step.actions),
    )


def _queued(observed: ObservedJob, clock: PassClock) -> JobStep:
    job = observed.job
    if job.cancel:
        text = "cancelled before a run began" if not job.status.run else "cancelled while it waited"
        return _moved(advance(job, JobPhase.CANCELLED, text, clock.unix_s), observed.run)
    return begin_run(observed, clock)


def _starting(observed: ObservedJob, run: RunRecord, clock: PassClock) -> JobStep:
    job = observed.job
    if stop := _must_stop(observed, run, clock):
        return stop
    workers = observed.workers
    if all(m.exit or (m.rank in workers and workers[m.rank].phase is WorkerPhase.RUNNING) for m in run.members):
        text = f"run {run.run}: {len(run.members)} worker{'s' * (len(run.members) > 1)} training"
        return _moved(advance(job, JobPhase.RUNNING, text, clock.unix_s), run)
    if clock.now_s - observed.since_s > (deadline_s := start_deadline_s(job)):
        late = [m for m in run.members if m.rank not in workers or workers[m.rank].phase is WorkerPhase.STARTING]
        who = f"rank {late[0].rank} on {late[0].node}" if late else "a worker"
        text = f"{who} did not start within {deadline_s:.0f} s; see `atoll logs {job.id}`"
        return _stop(observed, run, Cause.LATE, text, clock)
    return JobStep(job, run, actions=(*orders.launches(observed, run), *orders.plans(observed, run)))


def _running(observed: ObservedJob, run: RunRecord, clock: PassClock) -> JobStep:
    job, members = observed.job, members_of(run, observed.views.newest)
    if all(m.exit and m.exit.kind is WorkerExitKind.FINISHED for m in members):
        text = finished_text(len(members))
        ended = replace(run, ended_unix_s=clock.unix_s, why=text)
        return _moved(advance(with_learned(observed, job), JobPhase.DONE, text, clock.unix_s), ended)
    change = ViewStep() if job.cancel else next_view(observed, run, clock)
    if not change.nothing:
        return _changed(observed, run, change, clock)
    stop = None if change.stands_still else _must_stop(observed, run, clock) or _left_early(observed, run, clock)
    if stop is not None:
        return stop
    run, joined = joining.replacements(observed, run, clock)
    if joined:
        return JobStep(job, run, events=joined)
    run = with_measured_islands(observed, run)
    if has_recovered(job, clock.now_s - observed.since_s, observed.training.newest_step):
        last = job.status.last_failure
        back = f"its {job.spec.max_restarts} restarts are back" if job.status.restarts else "its losses count anew"
        text = f"trained for {GOOD_RUN_S / 60:.0f} minutes without a failure: {back}"
        job = replace(job, status=replace(job.status, restarts=0, last_failure=last and replace(last, times=1)))
        return JobStep(job, run, events=(NewEvent(kind=EventKind.NOTICE, cause=text),))
    assessment = _assess(observed, run, clock)
    if assessment.cause is not None:
        seen = replace(observed, job=assessment.job)
        if joining.can_change(observed, run):
            step = _in_place(seen, run, assessment, clock)
        else:
            step = _stop(seen, run, assessment.cause, assessment.text, clock)
        return replace(step, events=(*assessment.events, *step.events), judged=True, decisions=_decisions(assessment))
    plan, refusal = _replan(observed, clock)
    step = JobStep(
        assessment.job,
        run,
        plan,
        (*assessment.events, *refusal),
        judged=assessment.judged,
        refused=bool(refusal),
        decisions=_decisions(assessment),
    )
    if plan is not None:
        event = NewEvent(kind=EventKind.PLAN_ISSUED, plan=plan.id, step=plan.from_step, cause=plan.reason)
        issued = replace(observed.plans, issued=(*observed.plans.issued, plan))
        sent = tuple(orders.plans(replace(observed, plans=issued), run))  # now: another pass takes its time
        return replace(step, job=with_learned(observed, step.job), events=(*step.events, event), actions=sent)
    actions = (
        *orders.views(observed, run),
        *orders.plans(observed, run),
        *joining.launches(observed, run),
        *joining.stops(observed, run, clock),
    )
    return replace(step, actions=actions)


def _overflowed(observed: ObservedJob, run: RunRecord) -> tuple[ObservedJob, tuple[NewEvent, ...]]:
    """Lower the bounds of devices whose memory did not suffice. run: with the newest ends of its workers."""
    if observed.run is None or run is observed.run:
        return observed, ()
    learned, events = with_overflows(with_learned(observed, observed.job).learned, observed.run, run)
    if not events:
        return observed, ()
    return replace(observed, job=replace(observed.job, learned=learned)), events


def _recognised(observed: ObservedJob) -> tuple[ObservedJob, tuple[NewEvent, ...]]:
    """Record what the job trains, once that is known. Warn if its offline profile is of another model."""
    job, training = observed.job, observed.training
    if not training.workload_fingerprint:
        return observed, ()
    shared, own = training.state_bytes
    known = replace(job.learned, workload_fingerprint=training.workload_fingerprint, shared_bytes=shared, own_bytes=own)
    if job.learned.workload_fingerprint not in ("", training.workload_fingerprint):
        known = replace(known, memory={})  # another model needs other memory
    if known == job.learned:
        return observed, ()
    observed = replace(observed, job=replace(job, learned=known))
    if training.workload_fingerprint == job.learned.workload_fingerprint:
        return observed, ()
    profile = offline_profile(job.spec.adapt.profile) if job.spec.adapt.profile else None
    if profile is None or profile.is_of(training.workload_fingerprint):
        return observed, ()
    entries = training.profile.entries if training.profile else 0
    text = (
        f"the offline profile is not used: it is of another model ({profile.words}); this job trains "
        f"{entries:,} entries on {training.samples:,} samples. Names, shapes and the optimizer's settings count too. "
        f"Make one of this job: atoll profile {job.spec.script}"
    )
    return observed, (NewEvent(kind=EventKind.PROFILE_REFUSED, level=Level.WARNING, cause=text),)


def _assess(observed: ObservedJob, run: RunRecord, clock: PassClock) -> DeviceAssessment:
    """Assess free devices if the run could admit some: all its workers live and have one more step boundary to stop
    at."""
    newest = observed.views.newest
    members = members_of(run, newest)
    workers = [observed.workers.get(m.rank) for m in members if not m.exit]
    able = [worker for worker in workers if worker is not None and worker.uses_atoll and not worker.trained]
    if len(able) < len(members) or _is_changing(observed, run):
        return DeviceAssessment(job=observed.job)
    by_rank = by_position(run, newest)
    assessment = assess_devices(observed, by_rank, clock)
    if assessment != DeviceAssessment(job=observed.job, judged=assessment.judged):
        return assessment
    thin = without_thin_island(observed, by_rank, clock)
    return thin if thin.judged else assessment


def _decisions(assessment: DeviceAssessment) -> tuple[AdmissionRecord, ...]:
    return () if assessment.admission is None else (assessment.admission,)


def _is_changing(observed: ObservedJob, run: RunRecord) -> bool:
    """Return True if a view of the run is pending, or a worker is about to join."""
    newest = observed.views.newest
    if newest is None:
        return False
    pending = newest.state is not ViewState.IN_FORCE and newest.cause is not ViewCause.LAUNCH
    return pending or bool(joiners(run, newest))


def _changed(observed: ObservedJob, run: RunRecord, change: ViewStep, clock: PassClock) -> JobStep:
    """Move the run's views to their next state, or fence a run that cannot continue in place."""
    if change.again:
        text = _blamed(observed, run) or change.again
        stop = _stop(observed, run, Cause.LOSS, text, clock)
        why = NewEvent(kind=EventKind.RESTART_NEEDED, run=run.run, cause=change.again)
        return replace(stop, events=(why, *stop.events))
    return JobStep(
        change.job or observed.job,
        run,
        change.plan,
        change.events,
        placement=change.placement,
        views=change.views,
    )


def _in_place(observed: ObservedJob, run: RunRecord, assessment: DeviceAssessment, clock: PassClock) -> JobStep:
    """Admit devices, or leave some out, without an end of the run."""
    newest = observed.views.newest
    assert newest is not None
    if assessment.cause is Cause.GROW:
        taken = [device for device in observed.devices.free if device.name in assessment.names]
        run, events = joining.with_joiners(observed, run, newest, taken)
        return JobStep(observed.job, run, events=events)
    keeps = assessment.keeps_unsent
    change = left_out(observed, run, assessment.names, assessment.text, clock, keeps_unsent=keeps)
    return _changed(observed, run, change, clock)


def _replan(observed: ObservedJob, clock: PassClock) -> tuple[PlanRecord | None, tuple[NewEvent, ...]]:
    """Return the next plan, or the event that the planner has none, which comes once under each plan."""
    current, training = observed.plans.newest, observed.training
    if current is None or training.profile is None or not training.profile_is_news or observed.run is None:
        return None, ()
    if observed.views.newest is not None and observed.views.newest.view != current.view:
        return None, ()
    job, members = with_learned(observed, observed.job), members_of(observed.run, observed.views.newest)
    given = Given(
        now_s=clock.now_s,
        planned_s=observed.plans.planned_s,
        current=current,
        profile=training.profile,
        policy=policy_of(job, observed.strategy, training.samples),
        islands=tuple(member.island for member in members),
        max_batches=tuple(
            current.passes * job.learned.memory.get(name_of(member), UNKNOWN).max_batch for member in members
        ),
    )
    try:
        plan = next_plan(given)
    except (NoFeasiblePlan, BadInput) as error:
        if observed.plans.refused == (current.run, current.id):
            return None, ()
        kept = NewEvent(kind=EventKind.PLAN_KEPT, level=Level.WARNING, plan=current.id, cause=str(error))
        return None, (kept,)
    return None if plan is None else replace(plan, view=current.view), ()


def _must_stop(observed: ObservedJob, run: RunRecord, clock: PassClock) -> JobStep | None:
    """Stop a run that was cancelled, or of which a worker ended otherwise than by finishing."""
    if observed.job.cancel:
        return _stop(observed, run, Cause.CANCEL, "cancelled", clock)
    if text := _blamed(observed, run):
        return _stop(observed, run, Cause.LOSS, text, clock)
    return None


def _blamed(observed: ObservedJob, run: RunRecord) -> str:
    """Name the worker of the newest view whose end ended the run, as far as is known; empty if all finished."""
    if (found := root_cause(members_of(run, observed.views.newest))) is None:
        return ""
    member, exit = found
    return f"rank {member.rank} on {member.node} {in_words(exit)}"


def _left_early(observed: ObservedJob, run: RunRecord, clock: PassClock) -> JobStep | None:
    """Stop a run if a rank finished while others still train with Atoll. Ranks whose training is over, and those of a
    plain script, may end at any time: rank 0 may evaluate for long."""
    members = members_of(run, observed.views.newest)
    finished = [m.rank for m in members if m.exit]
    if not finished or observed.finished_since_s is None or clock.now_s - observed.finished_since_s <= LEFT_EARLY_S:
        return None
    workers = observed.workers
    others = (workers[m.rank] for m in members if not m.exit and m.rank in workers)
    if not any(worker.uses_atoll and not worker.trained for worker in others):
        return None
    return _stop(observed, run, Cause.LEFT_EARLY, left_early_text(finished), clock)


def _stopping(observed: ObservedJob, run: RunRecord, clock: PassClock) -> JobStep:
    job = observed.job
    if job.cancel and run.cause is not Cause.CANCEL:
        run = replace(run, cause=Cause.CANCEL, grace_s=_grace_s(observed, Cause.CANCEL), why="cancelled")
    if any(m.exit is None for m in run.members):
        return JobStep(job, run, actions=tuple(orders.stops(observed, run)))
    trained = limited_to(run, observed.views.newest)
    run = replace(run, recovery=recovery_at_end(observed, trained, _blamed(observed, run), clock))
    verdict = judge(job, replace(trained, recovery=run.recovery))
    moved = advance(with_learned(observed, job), verdict.after, verdict.reason, clock.unix_s)
    status = replace(
        moved.status,
        restarts=job.status.restarts + (verdict.counts and verdict.after is JobPhase.QUEUED),
        retry_delay_s=verdict.retry_delay_s,
        exit_code=verdict.code if verdict.after is JobPhase.FAILED else 0,
        last_failure=verdict.failure or job.status.last_failure,
    )
    return _moved(replace(moved, status=status), replace(run, ended_unix_s=clock.unix_s))


def _stop(observed: ObservedJob, run: RunRecord, cause: Cause, text: str, clock: PassClock) -> JobStep:
    """Fence the run in the transaction that decides to stop it; the stops go out on the next pass."""
    recovery = recovery_at_fence(observed, limited_to(run, observed.views.newest), cause, text, clock)
    over = (view for view in observed.views.kept if view.state is not ViewState.ABANDONED)
    views = tuple(move_view(view, ViewState.ABANDONED, "the run is stopped", clock.unix_s) for view in over)
    fenced = replace(run, fenced=True, cause=cause, grace_s=_grace_s(observed, cause), why=text, recovery=recovery)
    return replace(_moved(advance(observed.job, JobPhase.STOPPING, text, clock.unix_s), fenced), views=views)


def _grace_s(observed: ObservedJob, cause: Cause) -> float:
    if (grace_s := GRACE_S.get(cause)) is None:
        return LOST_GRACE_S
    workers = observed.workers.values()
    plain = bool(workers) and not any(worker.uses_atoll for worker in workers)
    return observed.job.spec.stop_grace_s or (PLAIN_GRACE_S if plain else grace_s)


def _moved(job: JobRecord, run: RunRecord | None) -> JobStep:
    level = {JobPhase.FAILED: Level.ERROR}.get(job.status.phase, Level.INFO)
    if job.status.phase is JobPhase.STOPPING and run is not None and run.cause not in (Cause.GROW, Cause.CANCEL):
        level = Level.WARNING
    event = NewEvent(kind=EventKind(job.status.phase), level=level, cause=job.status.reason)
    return JobStep(job, run, events=(event,))
