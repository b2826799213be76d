"""A loss is followed from its first sign to the first step after it, whoever leads meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lives import Breaking, Cluster, Killed
from made import (
    NOW_S,
    changed,
    clock,
    ended,
    exited,
    free,
    job,
    node,
    observed,
    run,
    worker,
)

from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.lifecycle.recovery import recovery_event
from atoll.controller.jobs.model.observed import RETURN_GRACE_S
from atoll.controller.state import keys
from atoll.controller.state.codec import decode
from atoll.controller.state.events import EventKind
from atoll.controller.state.records import Cause, JobPhase, RunRecord, WorkerExitKind
from atoll.controller.state.recovery import CommitRecord, RecoveryRecord
from atoll.controller.state.store import DeletePrefix, StateStore
from atoll.errors import LeadershipLost
from atoll.v1 import common_pb2

JOB = "tiny-0001"
KILLED = exited(WorkerExitKind.SIGNALLED, -9, "killed by signal 9", step=9)
OPEN = RecoveryRecord(run=1, cause="rank 1 on b was lost", lost=("rank 1 on b",), seen_unix_s=1.0, detected_unix_s=2.0)


def test_the_sentence_at_its_end() -> None:
    recovery = RecoveryRecord(
        run=3,
        cause="rank 1 on b was killed",
        reached_step=813,
        seen_unix_s=100.0,
        detected_unix_s=100.4,
        ended_unix_s=101.3,
        launched_unix_s=101.3,
        resumed_unix_s=103.9,
        tier="memory",
        step=812,
    )
    text = "recovered in 3.9 s: 0.4 detecting, 0.9 ending, 2.6 starting; from memory, step 812, 1 step lost"
    assert recovery_event(recovery).text == text
    begun_anew = replace(recovery, tier="start", step=0, reached_step=0, launched_unix_s=102.3, joined=("c",))
    assert recovery_event(begun_anew).text == (
        "recovered in 3.9 s: 0.4 detecting, 0.9 ending, 1.0 waiting for devices, 1.6 starting; from the beginning, "
        "no steps lost; c took over"
    )
    unheard = replace(recovery, reached_step=0)  # its controller and its agents were lost with it
    assert recovery_event(unheard).text.endswith("from memory, step 812, steps lost unknown")


def test_a_run_that_stops_to_grow_is_followed_like_one_that_is_lost() -> None:
    """1. A device is free: the run stops, at step 40. 2. The next one goes on from 38, for the last checkpoint was not
    written in time: two steps are lost, which nobody was told before."""
    trains = observed(job(), run("a"), node("a", {0: worker(step=40)}), free=[free("b", 0.0)])
    fenced = next_step(trains, clock())
    assert fenced.run is not None
    recovery = fenced.run.recovery
    assert recovery is not None
    assert (recovery.resize, recovery.lost, recovery.reached_step) == (True, (), 40)
    assert recovery.cause == "growing from 1 to 2 workers: devices are free on b"
    drained = ended(fenced.run, exited(WorkerExitKind.DRAINED, 85, step=40))
    over = next_step(observed(fenced.job, drained, node("a")), clock()).run
    assert over is not None
    assert over.recovery is not None
    assert (over.recovery.cause, over.recovery.resize) == (recovery.cause, True)
    closed = replace(
        over.recovery, seen_unix_s=9.0, detected_unix_s=9.0, ended_unix_s=10.0, launched_unix_s=10.0,
        resumed_unix_s=12.5, tier="memory", step=38, joined=("b",),
    )  # fmt: skip
    text = "resized in 3.5 s: 1.0 ending, 2.5 starting; from memory, step 38, 2 steps lost; b joined"
    assert recovery_event(closed).text == text
    killed = next_step(observed(fenced.job, ended(fenced.run, KILLED), node("a")), clock()).run
    assert killed is not None
    assert killed.recovery is not None
    assert (killed.recovery.resize, killed.recovery.lost) == (False, ("rank 0 on a",))


def test_a_silent_machine_is_counted_from_its_last_sign_of_life() -> None:
    gone = node("b", connected=False, last_message_s=NOW_S - 3.1)
    record = run("a", "b")
    step = next_step(observed(job(), record, node("a", {0: worker(step=41)}), gone), clock())
    assert step.run is not None
    recovery = step.run.recovery
    assert recovery is not None
    assert (recovery.run, recovery.lost, recovery.reached_step) == (1, ("rank 1 on b",), 41)
    assert recovery.detected_unix_s - recovery.seen_unix_s == pytest.approx(3.1)
    assert step.run.fenced


def test_peers_notice_first_and_the_machine_is_named_once_it_is_known() -> None:
    """1. Rank 0 loses its peer: the run is fenced, nobody is known to be lost. 2. The peer's machine stays silent."""
    left = exited(WorkerExitKind.PEER_LOST, 75, step=8)
    first = next_step(
        observed(job(), run("a", "b"), node("a", {0: worker(exit=left)}), node("b", {1: worker()})), clock()
    )
    assert first.run is not None
    assert first.run.recovery is not None
    assert (first.run.recovery.lost, first.run.recovery.reached_step) == ((), 8)
    gone = node("b", connected=False, last_message_s=NOW_S - 0.2)
    stopping = observed(first.job, first.run, node("a"), gone, since_s=NOW_S)
    early, later = (replace(clock(NOW_S + s), unix_s=clock().unix_s + s) for s in (1.2, 1.4))
    assert next_step(stopping, early).job.status.phase is JobPhase.STOPPING, "it may be on its way back"
    last = next_step(stopping, later)
    assert last.job.status.phase is JobPhase.QUEUED
    assert last.run is not None
    recovery = last.run.recovery
    assert recovery is not None
    assert recovery.lost == ("rank 1 on b",)
    assert recovery.cause == "rank 1 on b was lost: its peers lost it, and the agent of b is gone"
    assert recovery.detected_unix_s - recovery.seen_unix_s == pytest.approx(0.2)
    assert recovery.ended_unix_s - recovery.detected_unix_s == pytest.approx(1.4)
    assert last.job.status.last_failure is not None
    assert last.job.status.last_failure.step == 8, "the next loss is at another step: no backoff"


def test_a_loss_before_the_first_step_is_part_of_the_same_recovery() -> None:
    began = replace(OPEN, ended_unix_s=3.0, launched_unix_s=3.1)
    record = ended(replace(run("a", "c", number=2), recovery=began), None, KILLED)
    for phase, known in ((JobPhase.STARTING, 0), (JobPhase.RUNNING, 32)):
        view = observed(
            job(phase, run=2, initial_batch=known), record, node("a", {0: worker()}, run=2), node("c", run=2)
        )
        step = next_step(view, clock())
        assert step.run is not None
        recovery = step.run.recovery
        assert recovery is not None
        assert (recovery.run, recovery.lost, recovery.detected_unix_s) == (1, ("rank 1 on b", "rank 1 on c"), 2.0)
        assert (recovery.ended_unix_s, recovery.launched_unix_s) == (0.0, 0.0)


def test_a_loss_after_it_is_a_new_one_and_a_stop_that_was_wished_for_is_none() -> None:
    over = replace(OPEN, resumed_unix_s=4.0)
    record = ended(replace(run("a", number=2), recovery=over), KILLED)
    step = next_step(observed(job(run=2), record, node("a", run=2)), clock())
    assert step.run is not None
    assert step.run.recovery is not None
    assert step.run.recovery.run == 2
    cancelled = next_step(observed(job(cancel=True), run("a"), node("a", {0: worker()})), clock())
    assert cancelled.run is not None
    assert (cancelled.run.cause, cancelled.run.recovery) == (Cause.CANCEL, None)


def test_the_first_step_ends_it_and_the_record_says_from_where() -> None:
    record = replace(run("a", number=2), recovery=replace(OPEN, reached_step=44))
    view = observed(job(run=2), record, node("a", {0: worker()}, run=2), resumed=("disk", 40))
    assert next_step(view, clock()).run == record, "not before a step was done"
    step = next_step(changed(view, stepped=True), clock())
    assert step.run is not None
    assert step.run.recovery is not None
    assert (step.run.recovery.over, step.run.recovery.tier, step.run.recovery.steps_lost) == (True, "disk", 4)
    assert [event.kind for event in step.events] == ["RECOVERED"]
    assert next_step(changed(view, run=step.run, stepped=True), clock()).events == (), "told once"


async def told(store: StateStore, at: int, how: str) -> tuple[Cluster, int]:
    """1. Two workers train. 2. Machine b is lost with its worker; c stands by. 3. Run 2 trains on a and c. The `at`-th
    commit is broken; where it kills the controller, another goes on."""
    await store.commit([DeletePrefix("/atoll/")])
    cluster = Cluster(store, "a", "b", "c")
    for agent in cluster.agents.values():
        agent.tells = True
    breaking = Breaking(store, how)
    await cluster.elect(breaking)
    assert cluster.life is not None
    await cluster.life.submit(workers=(1, 2), standby=1)
    breaking.arm(at)

    async def relive(seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            try:
                await cluster.tick()
            except Killed:
                await cluster.elect()

    await relive(2)
    b = cluster.agents["b"]
    b.workers.clear()
    b.up = False
    await relive(RETURN_GRACE_S + 6)  # a leader that is new waits long for agents
    assert breaking.broke == (at > 0)
    return cluster, breaking.commits


async def check(store: StateStore, cluster: Cluster) -> None:
    assert cluster.life is not None
    state = cluster.life.ledger.jobs[JOB]
    assert (state.job.status.phase, state.job.status.run) == (JobPhase.RUNNING, 2)
    entry = await store.read(keys.run(JOB, 2))
    assert entry is not None
    record = decode(RunRecord, keys.run(JOB, 2), entry.value)
    assert [member.node for member in record.members] == ["a", "c"]
    recovery = record.recovery
    assert recovery is not None, [event.text for event in await cluster.life.ledger.events(JOB, after=0)]
    assert (recovery.run, recovery.over, recovery.lost, recovery.joined) == (1, True, ("rank 1 on b",), ("c",))
    assert (recovery.tier, recovery.step) == ("memory", 20)
    times = [recovery.detected_unix_s, recovery.ended_unix_s, recovery.launched_unix_s, recovery.resumed_unix_s]
    assert times == sorted(times)
    events = await cluster.life.ledger.events(JOB, after=0)
    assert len([event for event in events if event.kind is EventKind.RECOVERED]) == 1
    commit = await store.read(keys.commit(JOB))
    assert commit is not None
    complete = decode(CommitRecord, keys.commit(JOB), commit.value)
    assert (complete.run, complete.step, complete.shards) == (2, 21, 2)
    assert state.commit == complete
    plans = await cluster.life.ledger.plans(JOB, 2)
    assert [(plan.id, plan.planner) for plan in plans] == [(1, "even")]
    assert state.placement is not None
    assert state.placement == await cluster.life.ledger.placement(JOB, 2)


@pytest.mark.parametrize("how", ["before", "after", "killed"])
async def test_whoever_leads_the_recovery_goes_on_where_it_is(store: StateStore, how: str) -> None:
    cluster, commits = await told(store, at=0, how=how)
    await check(store, cluster)
    assert 8 < commits < 40
    for at in range(1, commits + 1):
        cluster, _ = await told(store, at, how)
        await check(store, cluster)


async def test_of_two_roots_the_older_writes_neither_commit_nor_recovery(store: StateStore) -> None:
    """1. A root is paused while its workers train. 2. Another leads. 3. The first wakes up: it sees steps complete in
    memory, then a worker killed, and writes nothing of it."""
    cluster = Cluster(store, "a")
    cluster.agents["a"].tells = True
    await cluster.elect()
    older = cluster.life
    assert older is not None
    await older.submit(workers=(1, 1))
    await cluster.ticks(1.0)
    key = (JOB, 1, 0)
    assert cluster.agents["a"].alive() == [key]
    await store.commit([DeletePrefix(keys.commit(JOB))])
    older.ledger.jobs[JOB].commit = None
    await cluster.elect()
    cluster.now_s += 2.0
    with pytest.raises(LeadershipLost):
        await older.tick()
    assert await store.read(keys.commit(JOB)) is None
    before = await store.read(keys.run(JOB, 1))
    cluster.agents["a"].end(key, common_pb2.EXIT_KIND_SIGNALLED, -9, "killed by signal 9")
    with pytest.raises(LeadershipLost):
        await older.tick()
    assert await store.read(keys.run(JOB, 1)) == before
    await cluster.ticks(3.0)
    assert cluster.life is not None
    found = cluster.life.ledger.jobs[JOB].run
    assert found is not None
    assert found.recovery is not None
    assert found.recovery.over


async def test_short_steps_are_one_write_a_second(store: StateStore) -> None:
    cluster = Cluster(store, "a")
    cluster.agents["a"].tells = True
    counting = Breaking(store, "before")
    await cluster.elect(counting)
    assert cluster.life is not None
    await cluster.life.submit(workers=(1, 1))
    await cluster.ticks(3.0)
    progress = cluster.life.progress.of(JOB, 1)
    assert progress is not None
    counting.arm(0)
    for _ in range(20):  # five seconds
        progress.memory_step += 3
        await cluster.tick()
    assert 4 <= counting.commits <= 6
    assert cluster.life.ledger.jobs[JOB].commit is not None
