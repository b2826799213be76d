"""What one job needs now: wanted against seen. Pure; may be asked any number of times.

Nothing here remembers: an action that was lost is asked for again as long as what is seen is not what is wanted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.deciding.given import Given
from atoll.controller.deciding.next import next_plan
from atoll.controller.jobs import recovering
from atoll.controller.jobs.exits import record_exits
from atoll.controller.jobs.failures import GOOD_RUN_S, has_recovered, judge, left_early_text, root_cause
from atoll.controller.jobs.growing import Look, learned, look_at_devices, stood_by
from atoll.controller.jobs.offline import offline_profile
from atoll.controller.jobs.phases import advance
from atoll.controller.jobs.placing import first_placement, is_same, shared_hosts
from atoll.controller.jobs.policy import adapted_by, begun_with, planned_total, policy_of
from atoll.controller.jobs.seen import (
    LEFT_EARLY_S,
    START_DEADLINE_S,
    Action,
    Alive,
    ForgetWorker,
    LaunchWorker,
    NewEvent,
    Seen,
    SeenWorker,
    SendPlan,
    Step,
    StopRun,
    Telling,
    WorkerKey,
)
from atoll.controller.jobs.start import StartDecision, Wanted, decide_start
from atoll.controller.state.records import (
    Cause,
    Exit,
    ExitKind,
    JobRecord,
    Level,
    Member,
    Phase,
    PlanRecord,
    RunRecord,
)

_SECONDS: Final = re.compile(r"[\d.]+ s\b")
LOST_GRACE_S: Final = 3.0
EXIT_EVENTS: Final = 32
"""Ends that are told one by one: a run of thousands may end at one moment, and all is one transaction of etcd."""
_GOOD_ENDS: Final = (ExitKind.FINISHED, ExitKind.DRAINED, ExitKind.STOPPED)
GRACE_S: Final[Mapping[Cause, float]] = {Cause.GROW: 10.0, Cause.SHRINK: 10.0, Cause.CANCEL: 2.0}


def next_step(seen: Seen, clock: Telling) -> Step:
    """At most one transition of one job, and the actions that its present phase calls for."""
    job = seen.job
    if job.phase is Phase.QUEUED:
        return _queued(seen, clock)
    if not job.phase.active or seen.run is None:
        return Step(job, seen.run)
    run = record_exits(seen, seen.run, clock)
    events = tuple(_exit_events(seen.run, run))
    run, recovered = recovering.trained(seen, run, clock)
    seen, told = _recognised(seen)
    step = {Phase.STARTING: _starting, Phase.RUNNING: _running, Phase.STOPPING: _stopping}[job.phase](seen, run, clock)
    return replace(step, events=(*events, *recovered, *told, *step.events), actions=(*_forget(seen), *step.actions))


def _queued(seen: Seen, clock: Telling) -> Step:
    job = seen.job
    if job.cancel:
        text = "cancelled before a run began" if not job.run else "cancelled while it waited"
        return _moved(advance(job, Phase.CANCELLED, text, clock.unix_s), seen.run)
    wanted = Wanted(
        min_workers=job.spec.min_workers,
        max_workers=job.spec.max_workers,
        since_s=seen.since_s,
        retry_delay_s=job.retry_delay_s,
        seats=tuple(Counter(m.node for m in seen.run.members).items()) if seen.run else (),
        settled=_settled(seen.run),
        standby=job.standby,
        learned=learned(job, seen.free),
        total_batch=planned_total(job) or job.total_batch,
    )
    decision = decide_start(clock.now_s, wanted, seen.free, seen.ports)
    if not decision.members:
        return Step(_explain(job, decision.reason), seen.run, held=decision.held)
    number = job.run + 1
    run = RunRecord(
        job=job.id,
        run=number,
        members=tuple(replace(m, island=seen.nodes[m.node].record.island) for m in decision.members),
        master_address=seen.nodes[decision.members[0].node].record.address,
        master_port=decision.master_port,
        began_unix_s=clock.unix_s,
        data_seed=seen.data_seed,
        recovery=recovering.launched(seen.run, decision.members, clock),
    )
    free = {(device.node, device.index): device for device in seen.free}
    taken = [free[m.node, m.device] for m in run.members]
    places = [Place(d.node, d.index, d.speed, d.work_per_s) for d in taken]
    plan = begun_with(job, first_plan(number, job.spec.split, places, wanted.learned, wanted.total_batch))
    started = replace(advance(job, Phase.STARTING, decision.reason, clock.unix_s), run=number, retry_delay_s=0.0)
    started, told = _left_waiting(started, decision, places)
    where = ", ".join(f"{m.node}/{m.device}" for m in run.members[:16])
    nodes = {m.node: seen.nodes[m.node].record for m in run.members}
    placement = first_placement(
        number, run.members, nodes, job.spec.checkpoint, before=seen.placement, links=seen.links
    )
    events = (
        NewEvent(Level.INFO, "phase", f"run {number}: {decision.reason} ({where})"),
        NewEvent(Level.INFO, "plan", f"plan 1 ({plan.planner}): {plan.reason}"),
        *_placed_anew(seen.placement, placement),
        *told,
    )
    return Step(started, run, plan, events, placement=placement)


def _placed_anew(before: PlanRecord | None, now: PlanRecord | None) -> Iterator[NewEvent]:
    """What is new in whose memory holds whose state; a restart on the same machines is silent."""
    if now is None or (before is not None and is_same(before, now)):
        return
    yield NewEvent(Level.INFO, "plan", f"placement: {now.reason}")
    hosts = shared_hosts(now)
    if hosts and (before is None or shared_hosts(before) != hosts):
        text = (
            f"copies in memory are on the host that they are to outlive ({', '.join(hosts[:8])} and others there): "
            "its loss goes back to the disk. More hosts would help"
        )
        yield NewEvent(Level.WARNING, "plan", text)


def _left_waiting(
    job: JobRecord, decision: StartDecision, places: Sequence[Place]
) -> tuple[JobRecord, tuple[NewEvent, ...]]:
    """The job with its standbys: without those that train now, with those that the start left out."""
    trains = {place.name for place in places}
    job = replace(job, standby={name: s for name, s in job.standby.items() if name not in trains})
    new = {name: standby for name, standby in decision.standby.items() if job.standby.get(name) != standby}
    return stood_by(job, new, decision.standby)


def _settled(run: RunRecord | None) -> frozenset[str]:
    if run is None:
        return frozenset()
    lost = {m.node for m in run.members if m.exit is not None and m.exit.kind is ExitKind.LOST}
    return frozenset(m.node for m in run.members) - lost


def _explain(job: JobRecord, reason: str) -> JobRecord:
    """Counting seconds down in etcd would be a write each pass, so what differs only in them is not written."""
    same = _SECONDS.sub("", reason) == _SECONDS.sub("", job.reason)
    return job if same else replace(job, reason=reason)


def _starting(seen: Seen, run: RunRecord, clock: Telling) -> Step:
    job = seen.job
    if stop := _must_stop(seen, run, clock):
        return stop
    workers = _workers(seen, run)
    if all(m.exit or (m.rank in workers and workers[m.rank].alive is Alive.RUNNING) for m in run.members):
        text = f"run {run.run}: {len(run.members)} worker{'s' * (len(run.members) > 1)} training"
        return _moved(advance(job, Phase.RUNNING, text, clock.unix_s), run)
    if clock.now_s - seen.since_s > START_DEADLINE_S:
        late = [m for m in run.members if m.rank not in workers or workers[m.rank].alive is Alive.STARTING]
        who = f"rank {late[0].rank} on {late[0].node}" if late else "a worker"
        text = f"{who} did not start within {START_DEADLINE_S:.0f} s; see `atoll logs {job.id}`"
        return _stop(seen, run, Cause.LATE, text, clock)
    launches = [
        LaunchWorker(m.node, WorkerKey(job.id, run.run, m.rank))
        for m in run.members
        if not m.exit and m.rank not in workers and _connected(seen, m.node)
    ]
    return Step(job, run, actions=(*launches, *_plans(seen, run)))


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
        sent = tuple(_plans(replace(seen, plans=(*seen.plans, plan)), run))  # now: another look takes its time
        learned = _learned(seen, look.job)
        return Step(learned, run, plan, (*look.events, event), sent, judged=look.judged, admission=look.admission)
    actions = tuple(_plans(seen, run))
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
    workers = _workers(seen, run)
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
    return f"rank {member.rank} on {member.node} {_in_words(exit)}"


def _left_early(seen: Seen, run: RunRecord, clock: Telling) -> Step | None:
    """A rank of Atoll's training finished while others go on. A plain script's ranks may end when they like."""
    finished = [m.rank for m in run.members if m.exit]
    if not finished or seen.finished_since_s is None or clock.now_s - seen.finished_since_s <= LEFT_EARLY_S:
        return None
    workers = _workers(seen, run)
    if not any(workers[m.rank].uses_atoll for m in run.members if not m.exit and m.rank in workers):
        return None
    return _stop(seen, run, Cause.LEFT_EARLY, left_early_text(finished), clock)


def _stopping(seen: Seen, run: RunRecord, clock: Telling) -> Step:
    job = seen.job
    if job.cancel and run.cause is not Cause.CANCEL:
        run = replace(run, cause=Cause.CANCEL, grace_s=GRACE_S[Cause.CANCEL], why="cancelled")
    if any(m.exit is None for m in run.members):
        return Step(job, run, actions=tuple(_stops(seen, run)))
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


def _workers(seen: Seen, run: RunRecord) -> dict[int, SeenWorker]:
    """The run's workers by rank, from the nodes they belong on and that are there."""
    found = {}
    for member in run.members:
        node = seen.nodes.get(member.node)
        worker = node.workers.get(WorkerKey(run.job, run.run, member.rank)) if node and node.connected else None
        if worker is not None:
            found[member.rank] = worker
    return found


def _connected(seen: Seen, name: str) -> bool:
    node = seen.nodes.get(name)
    return node is not None and node.connected


def _nodes(seen: Seen, members: Iterable[Member]) -> Iterator[str]:
    yield from sorted({m.node for m in members if _connected(seen, m.node)})


def _plans(seen: Seen, run: RunRecord) -> Iterator[Action]:
    """Plans after the first, which came with the launch: all that a node's present stream has not carried, in order.

    An agent hands plans to workers that it has started; what came while it still fetches their code would be lost."""
    workers = _workers(seen, run)
    living = [m for m in run.members if not m.exit]
    fetching = {m.node for m in living if m.rank not in workers or workers[m.rank].alive is Alive.STARTING}
    for node in _nodes(seen, (m for m in living if m.node not in fetching)):
        newest = seen.plans_sent.get(node, 1)
        yield from (SendPlan(node, run.job, run.run, plan.id) for plan in seen.plans if plan.id > newest)


def _stops(seen: Seen, run: RunRecord) -> Iterator[Action]:
    for node in _nodes(seen, (m for m in run.members if not m.exit)):
        yield StopRun(node, run.job, run.run, run.grace_s, run.why)


def _forget(seen: Seen) -> Iterator[Action]:
    """Ends that are in etcd need not be reported any more. Of `seen.run`, not of what this pass is about to write."""
    for member in seen.run.members if seen.run else ():
        key = WorkerKey(seen.job.id, seen.run.run if seen.run else 0, member.rank)
        node = seen.nodes.get(member.node)
        if member.exit and node and node.connected and key in node.workers:
            if node.workers[key].alive is Alive.EXITED:
                yield ForgetWorker(member.node, key)
            else:  # it counted as lost and is there again: an older run by now
                yield StopRun(member.node, key.job, key.run, 0.0, "it counted as lost")


def _exit_events(before: RunRecord, after: RunRecord) -> Iterator[NewEvent]:
    """One for each end, the bad ones first; beyond EXIT_EVENTS of them a last one counts the rest."""
    both = zip(before.members, after.members, strict=True)
    ends = [(new, new.exit) for old, new in both if old.exit is None and new.exit is not None]
    if len(ends) > EXIT_EVENTS:
        ends.sort(key=lambda end: end[1].kind in _GOOD_ENDS)
    for member, exit in ends[:EXIT_EVENTS]:
        text = f"run {after.run}: rank {member.rank} on {member.node} {_in_words(exit)}"
        yield NewEvent(Level.INFO if exit.kind in _GOOD_ENDS else Level.WARNING, "worker", text)
    if rest := [exit.kind for _, exit in ends[EXIT_EVENTS:]]:
        counts = ", ".join(f"{rest.count(kind)} {kind.lower()}" for kind in sorted(set(rest)))
        yield NewEvent(Level.INFO, "worker", f"run {after.run}: {len(rest)} more workers ended: {counts}")


def _in_words(exit: Exit) -> str:
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
