"""The reconciler over a real etcd, with a clock of its own. What fails is a commit, exactly the n-th one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from lives import Breaking, Cluster, Killed

from atoll.controller.jobs.lifecycle import reconciler
from atoll.controller.state import keys
from atoll.controller.state.codec import encode
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import JobPhase, Level
from atoll.controller.state.store import DeletePrefix, Put, StateStore
from atoll.errors import LeadershipLost
from atoll.v1 import common_pb2

JOB = "tiny-0001"
MAX_COMMITS = 40


async def story(cluster: Cluster, relive: Callable[[], Awaitable[None]]) -> None:
    """1. Two workers train. 2. One is killed: run 2 follows on both devices. 3. Agent b goes away with its worker:
    run 3 has one worker. 4. b returns: run 4 has two. 5. All finish. `relive` makes a tick, whatever breaks."""
    a, b = cluster.agents["a"], cluster.agents["b"]
    await until(cluster, relive, lambda: len(a.alive()) == len(b.alive()) == 1)
    await settle(relive)
    b.end(b.alive()[0], common_pb2.EXIT_KIND_SIGNALLED, -9, "killed by signal 9")
    await until(cluster, relive, lambda: bool(a.alive()) and a.alive()[0][1] == 2 and bool(b.alive()))
    await settle(relive)
    b.workers.clear()
    b.up = False
    await until(cluster, relive, lambda: bool(a.alive()) and a.alive()[0][1] == 3)
    await settle(relive)
    b.up = True
    await until(cluster, relive, lambda: bool(b.alive()) and b.alive()[0][1] == 4 and bool(a.alive()))
    await settle(relive)
    for agent in (a, b):
        agent.end(agent.alive()[0], common_pb2.EXIT_KIND_FINISHED)
    await until(cluster, relive, lambda: not a.workers and not b.workers)


async def until(cluster: Cluster, relive: Callable[[], Awaitable[None]], condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        await relive()
    life = cluster.life
    raise AssertionError(
        [(s.job.status.phase, s.job.status.reason) for s in life.ledger.jobs.values()] if life else "no life"
    )


async def settle(relive: Callable[[], Awaitable[None]]) -> None:
    for _ in range(4):
        await relive()


async def tell(store: StateStore, at: int, how: str) -> tuple[Cluster, int]:
    """The whole story with the `at`-th commit broken. Returns the number of commits too."""
    await store.commit([DeletePrefix("/atoll/")])
    cluster = Cluster(store, "a", "b")
    breaking = Breaking(store, how)
    await cluster.elect(breaking)
    assert cluster.life is not None
    await cluster.life.submit()
    breaking.arm(at)  # the submit does not count: its client repeats it

    async def relive() -> None:
        try:
            await cluster.tick()
        except Killed:
            await cluster.elect()

    await story(cluster, relive)
    assert breaking.broke == (at > 0)
    return cluster, breaking.commits


async def check(cluster: Cluster) -> None:
    assert cluster.life is not None
    state = cluster.life.ledger.jobs[JOB]
    assert (state.job.status.phase, state.job.status.run, state.job.status.restarts) == (JobPhase.DONE, 4, 0)
    assert [agent.doubles for agent in cluster.agents.values()] == [[], []]
    events = await cluster.life.ledger.events(JOB, after=0)
    assert [event.sequence for event in events] == list(range(1, state.job.status.events + 1))
    kinds = ("SUBMITTED", "STARTING", "RUNNING", "STOPPING", "QUEUED", "DONE")
    assert [(event.kind, event.run) for event in events if event.kind in kinds] == [
        ("SUBMITTED", 0),
        *[("STARTING", 1), ("RUNNING", 1), ("STOPPING", 1), ("QUEUED", 1)],
        *[("STARTING", 2), ("RUNNING", 2), ("STOPPING", 2), ("QUEUED", 2)],
        *[("STARTING", 3), ("RUNNING", 3), ("STOPPING", 3), ("QUEUED", 3)],
        *[("STARTING", 4), ("RUNNING", 4), ("DONE", 4)],
    ]
    started = sorted(key for agent in cluster.agents.values() for key in agent.started)
    assert started == [(JOB, 1, 0), (JOB, 1, 1), (JOB, 2, 0), (JOB, 2, 1), (JOB, 3, 0), (JOB, 4, 0), (JOB, 4, 1)]


@pytest.mark.parametrize("how", ["before", "after", "killed"])
async def test_whatever_write_fails_the_story_ends_the_same(store: StateStore, how: str) -> None:
    """Each commit in turn does not happen, happens without an answer, or is the last thing a controller does; another
    takes over then. No worker is started twice, none is lost, no event is missing or told twice."""
    cluster, commits = await tell(store, at=0, how=how)
    await check(cluster)
    assert 15 < commits < MAX_COMMITS
    for at in range(1, commits + 1):
        cluster, _ = await tell(store, at, how)
        await check(cluster)


async def test_a_leader_that_was_replaced_writes_nothing(store: StateStore) -> None:
    cluster = Cluster(store, "a")
    await cluster.elect()
    assert cluster.life is not None
    old = cluster.life
    await old.submit(workers=(1, 1))
    await cluster.elect()
    with pytest.raises(LeadershipLost):
        await old.tick()
    assert cluster.agents["a"].started == []


async def test_jobs_are_served_in_the_order_they_came_and_small_ones_pass_by_what_cannot_start(
    store: StateStore,
) -> None:
    cluster = Cluster(store, "a", "b")
    await cluster.elect()
    assert cluster.life is not None
    await cluster.life.submit("large-0001", workers=(3, 3))
    await cluster.life.submit("first-0001", workers=(1, 1))
    await cluster.life.submit("other-0001", workers=(1, 1))
    await cluster.life.submit("later-0001", workers=(1, 1))
    await cluster.ticks(3)
    phases = {name: state.job.status.phase for name, state in cluster.life.ledger.jobs.items()}
    assert phases == {
        "large-0001": JobPhase.QUEUED,
        "first-0001": JobPhase.RUNNING,
        "other-0001": JobPhase.RUNNING,
        "later-0001": JobPhase.QUEUED,
    }
    assert cluster.life.ledger.jobs["large-0001"].job.status.reason == "waiting for devices: 0 free, at least 3 needed"


async def test_devices_that_a_job_waits_with_are_not_given_to_the_next(store: StateStore) -> None:
    cluster = Cluster(store, "a")
    await cluster.elect()
    assert cluster.life is not None
    await cluster.life.submit("wants-0002", workers=(1, 2))
    await cluster.life.submit("quick-0001", workers=(1, 1))
    await cluster.ticks(0.5)
    assert cluster.agents["a"].started == []
    await cluster.ticks(2)
    assert cluster.agents["a"].started == [("wants-0002", 1, 0)]


async def test_a_record_of_another_version_is_left_alone_and_the_rest_goes_on(store: StateStore) -> None:
    await store.commit([Put(keys.job("old-0001"), b'{"id": "old-0001", "colour": "blue"}')])
    cluster = Cluster(store, "a")
    a = cluster.agents["a"]
    running = common_pb2.WORKER_STATE_RUNNING
    a.workers["old-0001", 1, 0] = common_pb2.WorkerStatus(
        id=common_pb2.WorkerId(job="old-0001", run=1, rank=0), state=running
    )
    await cluster.elect()
    assert cluster.life is not None
    assert "etcd key /atoll/jobs/old-0001" in cluster.life.ledger.unreadable["old-0001"]
    await cluster.ticks(2)
    assert a.alive() == [("old-0001", 1, 0)]


async def test_a_script_that_fails_the_same_way_twice_is_not_tried_a_third_time(store: StateStore) -> None:
    cluster = Cluster(store, "a")
    a = cluster.agents["a"]
    await cluster.elect()
    assert cluster.life is not None
    await cluster.life.submit(workers=(1, 1), max_restarts=9)
    for number in (1, 2):
        await until(cluster, cluster.tick, lambda: bool(a.alive()))
        key = a.alive()[0]
        assert key[1] == number
        a.workers[key].step = 5
        a.end(key, common_pb2.EXIT_KIND_FAILED, 3, f"ValueError at 0x7f{number}")
        await until(cluster, cluster.tick, lambda: not a.workers)
    job = cluster.life.ledger.jobs[JOB].job
    assert (job.status.phase, job.status.restarts, job.status.exit_code) == (JobPhase.FAILED, 1, 3)
    assert "a third try would not help" in job.status.reason


async def test_only_the_newest_ended_jobs_are_kept(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.controller.jobs.records.retention.KEPT_ENDED_JOBS", 2)
    cluster = Cluster(store, "a")
    await cluster.elect()
    assert cluster.life is not None
    ledger = cluster.life.ledger
    await store.commit([Put(keys.code("0" * 64, 0), b"code")])
    for i in range(4):
        await cluster.life.submit(f"tiny-{i:04d}", workers=(1, 1))
        await until(cluster, cluster.tick, lambda: bool(cluster.agents["a"].alive()))
        cluster.agents["a"].end(cluster.agents["a"].alive()[0], common_pb2.EXIT_KIND_FINISHED)
        await until(cluster, cluster.tick, lambda: not cluster.agents["a"].workers)
    await cluster.tick()
    assert sorted(ledger.jobs) == ["tiny-0002", "tiny-0003"]
    left = [key for key in (await store.read_prefix("/atoll/")).entries if "tiny-0000" in key or "tiny-0001" in key]
    assert left == []
    assert await store.read(keys.code("0" * 64, 0)) is not None  # the kept jobs use it


async def test_events_are_bounded(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.controller.jobs.records.retention.KEPT_EVENTS", 5)
    cluster, _ = await tell(store, 0, "before")
    assert cluster.life is not None
    events = await cluster.life.ledger.events(JOB, after=0)
    newest = cluster.life.ledger.jobs[JOB].job.status.events
    assert [event.sequence for event in events] == list(range(newest - 4, newest + 1))


async def test_a_node_is_sent_one_launch_whatever_its_devices(store: StateStore) -> None:
    """1. Two nodes of eight devices, a job of sixteen workers: it was sixteen launches, each with all that they have in
    common. 2. An agent of before reads only a launch's first worker: it is asked again for those that are missing."""
    cluster = Cluster(store, "a", "b")
    for agent in cluster.agents.values():
        agent.devices = 8
    cluster.agents["b"].earlier = True
    await cluster.elect()
    assert cluster.life is not None
    await cluster.life.submit(workers=(16, 16))
    await cluster.ticks(4)
    assert cluster.life.ledger.jobs[JOB].job.status.phase is JobPhase.RUNNING
    assert [len(agent.alive()) for agent in cluster.agents.values()] == [8, 8]
    assert [agent.launches for agent in cluster.agents.values()] == [1, 8]
    assert [agent.doubles for agent in cluster.agents.values()] == [[], []]


async def test_of_too_many_events_of_the_cluster_it_is_told_how_many_there_were(store: StateStore) -> None:
    """1. 300 nodes join at once: beyond 256 their events were dropped without a word. 2. Now the last counts them."""
    cluster = Cluster(store)
    await cluster.elect()
    assert cluster.life is not None
    for number in range(300):
        cluster.life.reconciler.add_cluster_event(NewEvent(kind=EventKind.NODE, cause=f"node {number} joined"))
    await cluster.tick()
    told = await cluster.life.ledger.events(keys.CLUSTER, after=0)
    assert [event.text for event in told[-2:]] == [
        "node 255 joined",
        "44 more events of the cluster came at once and are not told one by one",
    ]
    assert (len(told), told[-1].level) == (257, Level.WARNING)
    await cluster.tick()
    assert len(await cluster.life.ledger.events(keys.CLUSTER, after=0)) == 257


async def test_jobs_that_come_at_once_start_in_order_over_several_passes(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Three jobs for one device each are there when the first pass begins; a pass starts workers of one. 2. A pass
    started all jobs that waited: 2 s for a hundred of 80 workers, in which no agent was heard. 3. Now each pass starts
    one, the oldest first, and asks for the next at once."""
    monkeypatch.setattr(reconciler, "STARTED_A_PASS", 1)
    cluster = Cluster(store, "a", "b", "c")
    await cluster.elect()
    assert cluster.life is not None
    for number in range(3):
        await cluster.life.submit(f"tiny-000{number}", workers=(1, 1))
    started = []
    for _ in range(3):
        await cluster.tick()
        started.append(sum(len(agent.started) for agent in cluster.agents.values()))
        assert cluster.life.reconciler._nudged.is_set() == (started[-1] < 3)
        cluster.life.reconciler._nudged.clear()
    assert started == [1, 2, 3]
    await cluster.tick()
    assert {state.job.status.phase for state in cluster.life.ledger.jobs.values()} == {JobPhase.RUNNING}


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_lost_node_is_removed_from_etcd_once_and_no_later_leader_waits_for_it(
    store: StateStore, how: str
) -> None:
    """1. Agents a and b are in etcd. 2. b vanishes, and the write that removes it fails, or its answer is lost.
    3. It is tried again, and one event says that b was lost. 4. The next leader waits for a alone."""
    cluster = Cluster(store, "a", "b")
    breaking = Breaking(store, how)
    await cluster.elect(breaking)
    assert cluster.life is not None
    for name, agent in cluster.agents.items():
        await store.commit([Put(keys.node(name), encode(agent.record))])
    await cluster.ticks(1)
    cluster.agents["b"].up = False
    breaking.arm(1)
    await cluster.ticks(5)
    assert breaking.broke
    told = await cluster.life.ledger.events(keys.CLUSTER, after=0)
    assert [(event.kind, event.node) for event in told if event.kind is EventKind.NODE_LOST] == [
        (EventKind.NODE_LOST, "b")
    ]
    await cluster.elect()
    assert set(cluster.life.sessions.remembered) == {"a"}
