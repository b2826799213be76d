"""A leader epoch over a real etcd whose answers get lost, exactly the n-th one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from losing import LosingAnswers
from made import job, node, run

from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch, LeaderEpochSettings
from atoll.controller.state import keys
from atoll.controller.state.codec import encode
from atoll.controller.state.election import Election
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.records import JobPhase, JobRecord
from atoll.controller.state.store import Change, Delete, DeletePrefix, Fence, Put
from atoll.errors import ControllerUnreachable

GONE, NEW = "gone-0001", "new-0001"
MOST_CALLS = 60
TTL_S = 6
"""A machine at load 10 once renewed no lease for 3 s, and the leader was right to give up."""


async def put(store: EtcdStore, name: str, **fields: object) -> None:
    """What another controller may have written: a job that waits after its first run."""
    made: JobRecord = job(JobPhase.QUEUED, id=name, **fields)
    ran = run("a", job=name)
    await store.commit([Put(keys.run(name, 1), encode(ran)), Put(keys.job(name), encode(made))])


async def story(store: EtcdStore, at: int) -> str:
    """With the answer to the `at`-th call of the loops lost. Returns which one that was; empty if there are fewer."""
    await store.commit([DeletePrefix("/atoll/")])
    fence = Fence(keys.LEADER, await store.commit([Put(keys.LEADER, b"me")]))
    await put(store, GONE)
    losing = LosingAnswers(store, resets=True)
    settings = LeaderEpochSettings(controller="here", heartbeat_s=1.0, node_lease_s=3.0, private=True)
    epoch = LeaderEpoch(losing, fence, settings, lambda job: None)
    await epoch.load()
    await store.commit([Delete(keys.job(GONE))])
    losing.arm(at)
    running = asyncio.create_task(epoch.run())
    try:
        await put(store, NEW)
        await until(running, lambda: NEW in epoch.ledger.jobs and GONE not in epoch.ledger.jobs)
        await put(store, NEW, cancel=True)
        await until(running, lambda: epoch.ledger.jobs[NEW].job.status.phase is JobPhase.CANCELLED)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return losing.lost


async def test_an_agent_is_not_admitted_to_an_epoch_that_ended_while_etcd_was_silent(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An agent registers, and etcd does not answer. 2. The epoch ends. 3. etcd answers, and still has the leader's
    key. The agent is sent away: in the ended epoch it would never hear of the next one, which takes it for lost."""
    fence = Fence(keys.LEADER, await store.commit([Put(keys.LEADER, b"me")]))
    settings = LeaderEpochSettings(controller="here", heartbeat_s=1.0, node_lease_s=3.0, private=True)
    epoch = LeaderEpoch(store, fence, settings, lambda job: None)
    await epoch.load()
    asked, answers, commit = asyncio.Event(), asyncio.Event(), store.commit

    async def commit_late(changes: Sequence[Change], *given: Any) -> int:
        if [change.key for change in changes] == [keys.node("a")]:
            asked.set()
            await answers.wait()
        return await commit(changes, *given)

    monkeypatch.setattr(store, "commit", commit_late)
    running = asyncio.create_task(epoch.run())
    joining = asyncio.create_task(epoch.join("session", node("a").record))
    async with asyncio.timeout(30):
        await asked.wait()
        running.cancel()
        await epoch.over.wait()
        answers.set()
        with pytest.raises(ControllerUnreachable, match="connect again"):
            await joining
    assert not epoch.sessions.connected
    await asyncio.gather(running, return_exceptions=True)


async def until(running: asyncio.Task[None], condition: object) -> None:
    async with asyncio.timeout(30):
        while not condition():  # type: ignore[operator]
            if running.done():
                running.result()
            await asyncio.sleep(0.005)


async def test_whatever_answer_of_etcd_is_lost_the_leader_goes_on(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A controller leads; the history of etcd was compacted, so it lists all jobs again: one is gone. 2. Somebody
    writes a job that ran once. 3. It is cancelled, and the controller writes that. Each answer in turn is lost that
    the loops wait for: none ends them, and the mirror comes to say what etcd says."""
    monkeypatch.setattr("atoll.controller.jobs.records.ledger.FOLLOW_RETRY_S", 0.01)
    monkeypatch.setattr("atoll.controller.jobs.lifecycle.reconciler.RETRY_S", 0.01)
    lost = []
    for at in range(1, MOST_CALLS):
        if not (call := await story(store, at)):
            break
        lost.append(call)
    assert {call.partition(" ")[0] for call in lost} == {"reading", "listing", "writing"}
    assert {"listing /atoll/jobs/", f"reading {keys.run(NEW, 1)}", f"reading {keys.commit(NEW)}"} <= set(lost)


async def test_whatever_answer_of_etcd_is_lost_a_candidate_leads_in_the_end(store: EtcdStore) -> None:
    """1. A candidate asks who leads, gets a lease and creates the key. 2. Each answer in turn is lost. 3. It leads
    under the key that is in etcd, and goes on leading when the answer to a renewal is lost.
    4. It resigns, and that answer is lost too."""
    lost = []
    for at in range(1, 7):
        await store.commit([DeletePrefix("/atoll/")])
        losing = LosingAnswers(store)
        losing.arm(at)
        leadership = await asyncio.wait_for(Election(losing, keys.LEADER, b"me", TTL_S).campaign(), 30)
        async with asyncio.timeout(30):
            while not losing.lost:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        entry = await store.read(keys.LEADER)
        assert entry is not None
        assert (entry.create_revision, leadership.lost.is_set()) == (leadership.fence.create_revision, False)
        lost.append(losing.lost)
        losing.arm(1, "revoking")  # not a renewal that comes before it
        await leadership.resign()
        assert losing.lost == "revoking a lease"
    assert {"granting a lease", "writing", "refreshing a lease", f"reading {keys.LEADER}"} <= set(lost)
