"""What one job needs now: wanted against seen. Pure; may be asked any number of times.

How a waiting job is started is in launching.py, what nodes are asked to do in orders.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from atoll.controller.deciding.given import Given
from atoll.controller.deciding.next import next_plan
from atoll.controller.jobs.admission.growing import Look, look_at_devices
from atoll.controller.jobs.lifecycle import orders, recovering
from atoll.controller.jobs.lifecycle.exits import exit_events, in_words, record_exits
from atoll.controller.jobs.lifecycle.failures import GOOD_RUN_S, has_recovered, judge, left_early_text, root_cause
from atoll.controller.jobs.lifecycle.launching import begin_run
from atoll.controller.jobs.lifecycle.observed import (
    LEFT_EARLY_S,
    START_DEADLINE_S,
    Alive,
    NewEvent,
    Seen,
    Step,
    Telling,
)
from atoll.controller.jobs.lifecycle.orders import workers_of
from atoll.controller.jobs.lifecycle.phases import advance
from atoll.controller.jobs.lifecycle.policy import adapted_by, policy_of
from atoll.controller.jobs.records.offline_profile import offline_profile
from atoll.controller.state.records import Cause, ExitKind, JobRecord, Level, Phase, PlanRecord, RunRecord

LOST_GRACE_S: Final = 3.0
GRACE_S: Final[Mapping[Cause, float]] = {Cause.GROW: 10.0, Cause.SHRINK: 10.0, Cause.CANCEL: 2.0}


def next_step(seen: Seen, clock: Telling) -> Step:
    """At most one transition of one job, and the actions that its present phase calls for."""
    job = seen.job
    if job.phase is Phase.QUEUED:
        return _queued(seen, clock)
    if not job.phase.active or seen.run is None:
        return Step(job, seen.run)
    run = record_exits(seen, seen.run, clock)
    events = tuple(exit_events(seen.run, run))
    run, recovered = recovering.trained(seen, run, clock)
    seen, told = _recognised(seen)
    step = {Phase.STARTING: _starting, Phase.RUNNING: _running, Phase.STOPPING: _stopping}[job.phase](seen, run, clock)
    events = (*events, *recovered, *told, *step.events)
    return replace(step, events=events, actions=(*orders.forgets(seen), *step.actions))


def _queued(seen: Seen, clock: Telling) -> Step:
    job = seen.job
    if job.cancel:
        text = "cancelled before a run began" if not job.run else "cancelled while it waited"
        return _moved(advance(job, Phase.CANCELLED, text, clock.unix_s), seen.run)
    return begin_run(seen, clock)


def _starting(seen: Seen, run: RunRecord, clock: Telling) -> Step:
    job = seen.job
    if stop := _must_stop(seen, run, clock):
        return stop
    workers = workers_of(seen, run)
    if all(m.exit or (m.rank in workers and workers[m.rank].alive is Alive.RUNNING) for m in run.members):
        text = f"run {run.run}: {len(run.members)} worker{'s' * (len(run.members) > 1)} training"
        return _moved(advance(job, Phase.RUNNING, text, clock.unix_s), run)
    if clock.now_s - seen.since_s > START_DEADLINE_S:
        late = [m for m in run.members if m.rank not in workers or workers[m.rank].alive is Alive.STARTING]
        who = f"rank {late[0].rank} on {late[0].node}" if late else "a worker"
        text = f"{who} did not start within {START_DEADLINE_S:.0f} s; see `atoll logs {job.id}`"
        return _stop(seen, run, Cause.LATE, text, clock)
    return Step(job, run, actions=(*orders.launches(seen, run), *orders.plans(seen, run)))


def _running(seen: Seen, run: RunRecord, clock: Telling) -> Step:
    job = seen.job
    if all(m.exit and m.exit.kind is ExitKind.FINISHED for m in run.members):
        text = f"all {len(run.members)} ranks finished"
        ended = replace(run, ended_unix_s=clock.unix_s, why=text)
        return _moved(advance(_learned(seen, job), Phase.DONE, text, clock.unix_s), ended)
    if stop := _must_stop(seen, run, clock) or _left_early(seen, run, clock):
        return stop
    if has_recovered(job, clock.now_s - seen.since_s, seen.newest_step):
        back = f"its {job.spec.max_restarts} restarts are back"
        text = f"trained for {GOOD_RUN_S / 60:.0f} minutes without a failure: {back}"
        return Step(replace(job, restarts=0), run, events=(NewEvent(Level.INFO, "notice", text),))
    look = _look(seen, run, clock)
    if look.cause is not None:
        stop = _stop(replace(seen, job=look.job), run, look.cause, look.text, clock)
        return replace(stop, events=(*look.events, *stop.events), judged=True, admission=look.admission)
    plan = _replan(seen, clock)
    if plan is not None:
        text = f"plan {plan.id} from step {plan.from_step}: {plan.reason}"
        event = NewEvent(Level.INFO, "plan", text)
        sent = tuple(orders.plans(replace(seen, plans=(*seen.plans, plan)), run))  # now: another look takes its time
        learned = _learned(seen, look.job)
        return Step(learned, run, plan, (*look.events, event), sent, judged=look.judged, admission=look.admission)
    actions = tuple(orders.plans(seen, run))
    return Step(look.job, run, events=look.events, actions=actions, judged=look.judged, admission=look.admission)


def _recognised(seen: Seen) -> tuple[Seen, tuple[NewEvent, ...]]:
    """The job with what it trains, once that is known; told where its offline profile is of something else."""
    job = seen.job
    if not seen.trains or seen.trains == job.trains:
        return seen, ()
    seen = replace(seen, job=replace(job, trains=seen.trains))
    profile = offline_profile(job.spec.adapt.profile) if job.spec.adapt.profile else None
    if profile is None or profile.is_of(seen.trains):
        return seen, ()
    entries = seen.profile.entries if seen.profile else 0
    text = (
        f"the offline profile is not used: it is of another model ({profile.words}); this job trains "
        f"{entries:,} entries on {seen.samples:,} samples. Names, shapes and the optimizer's settings count too. Make "
        f"one of this job: atoll profile {job.spec.script}"
    )
    return seen, (NewEvent(Level.WARNING, "plan", text),)


def _look(seen: Seen, run: RunRecord, clock: Telling) -> Look:
    """At free devices, where the run could take some in: its workers all live and can stop at a step boundary."""
    workers = workers_of(seen, run)
    if any(m.exit or m.rank not in workers or not workers[m.rank].uses_atoll for m in run.members):
        return Look(job=seen.job)
    return look_at_devices(seen, run, clock)


def _replan(seen: Seen, clock: Telling) -> PlanRecord | None:
    if not seen.plans or seen.profile is None or not seen.profile_is_news or seen.run is None:
        return None
    return next_plan(
        Given(
            now_s=clock.now_s,
            planned_s=seen.planned_s,
            current=seen.plans[-1],
            profile=seen.profile,
            policy=policy_of(_learned(seen, seen.job), seen.samples),
            islands=tuple(m.island for m in seen.run.members),
        )
    )


def _must_stop(seen: Seen, run: RunRecord, clock: Telling) -> Step | None:
    """Cancelled, or a worker ended in some other way than by finishing."""
    if seen.job.cancel:
        return _stop(seen, run, Cause.CANCEL, "cancelled", clock)
    if text := _blamed(run):
        return _stop(seen, run, Cause.LOSS, text, clock)
    return None


def _blamed(run: RunRecord) -> str:
    """Whose end ended the run, as far as is known; empty where all finished."""
    if (found := root_cause(run.members)) is None:
        return ""
    member, exit = found
    return f"rank {member.rank} on {member.node} {in_words(exit)}"


def _left_early(seen: Seen, run: RunRecord, clock: Telling) -> Step | None:
    """A rank of Atoll's training finished while others go on. A plain script's ranks may end when they like."""
    finished = [m.rank for m in run.members if m.exit]
    if not finished or seen.finished_since_s is None or clock.now_s - seen.finished_since_s <= LEFT_EARLY_S:
        return None
    workers = workers_of(seen, run)
    if not any(workers[m.rank].uses_atoll for m in run.members if not m.exit and m.rank in workers):
        return None
    return _stop(seen, run, Cause.LEFT_EARLY, left_early_text(finished), clock)


def _stopping(seen: Seen, run: RunRecord, clock: Telling) -> Step:
    job = seen.job
    if job.cancel and run.cause is not Cause.CANCEL:
        run = replace(run, cause=Cause.CANCEL, grace_s=GRACE_S[Cause.CANCEL], why="cancelled")
    if any(m.exit is None for m in run.members):
        return Step(job, run, actions=tuple(orders.stops(seen, run)))
    run = replace(run, recovery=recovering.ended(seen, run, _blamed(run), clock))
    verdict = judge(job, run)
    moved = advance(_learned(seen, job), verdict.after, verdict.reason, clock.unix_s)
    moved = replace(
        moved,
        restarts=job.restarts + (verdict.counts and verdict.after is Phase.QUEUED),
        retry_delay_s=verdict.retry_delay_s,
        exit_code=verdict.code if verdict.after is Phase.FAILED else 0,
        last_failure=verdict.failure or job.last_failure,
    )
    return _moved(moved, replace(run, ended_unix_s=clock.unix_s))


def _stop(seen: Seen, run: RunRecord, cause: Cause, text: str, clock: Telling) -> Step:
    """Fence the run in the transaction that decides to stop it; the stops go out on the next look."""
    recovery = recovering.begun(seen, run, cause, text, clock)
    fenced = replace(
        run, fenced=True, cause=cause, grace_s=GRACE_S.get(cause, LOST_GRACE_S), why=text, recovery=recovery
    )
    return _moved(advance(seen.job, Phase.STOPPING, text, clock.unix_s), fenced)


def _moved(job: JobRecord, run: RunRecord | None) -> Step:
    level = {Phase.FAILED: Level.ERROR}.get(job.phase, Level.INFO)
    if job.phase is Phase.STOPPING and run is not None and run.cause not in (Cause.GROW, Cause.CANCEL):
        level = Level.WARNING
    return Step(job, run, events=(NewEvent(level, "phase", f"{job.phase.lower()}: {job.reason}"),))


def _learned(seen: Seen, job: JobRecord) -> JobRecord:
    """The job with what its current run taught about devices, for the first plan of the next run."""
    if seen.run is None:
        return job
    places = {m.rank: f"{m.node}/{m.device}" for m in seen.run.members}
    ranks = seen.profile.ranks if seen.profile else {}
    measured = {
        places[rank]: known.compute_s / known.local_batch
        for rank, known in ranks.items()
        if rank in places and known.local_batch
    }
    work = {f"{name}/{d.index}": d.work_per_s for name, node in seen.nodes.items() for d in node.record.devices}
    return replace(
        job,
        speeds={**job.speeds, **measured},
        learned_at={**job.learned_at, **{name: work.get(name, 0.0) for name in measured}},
        total_batch=seen.total_batch or job.total_batch,
        initial_batch=seen.batch_size or job.initial_batch,
        adapted=adapted_by(seen.plans[-1]) if seen.plans else job.adapted,
        checkpoint_step=max(seen.checkpoint_step, job.checkpoint_step),
        memory_step=seen.memory_step or job.memory_step,
    )
