"""What etcd keeps of jobs, live and over, on a real etcd."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from made import job, run, spec

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch, LeaderEpochSettings
from atoll.controller.jobs.model.observed import JobStep
from atoll.controller.jobs.records.ledger import Ledger
from atoll.controller.state import keys
from atoll.controller.state.codec import encode
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.records import JobPhase, PlacementRecord
from atoll.controller.state.store import DeletePrefix, Fence, Put
from atoll.errors import Conflict, StoreUnavailable

JOB = "tiny-0001"
CODE = b"x" * 3_000_000


async def stored(store: EtcdStore, prefix: str = "/atoll/") -> list[str]:
    return list((await store.read_prefix(prefix, keys_only=True)).entries)


async def epoch_of(store: EtcdStore) -> LeaderEpoch:
    """A leader; the one before does not lead any more."""
    await store.commit([DeletePrefix(keys.LEADER)])
    fence = Fence(keys.LEADER, await store.commit([Put(keys.LEADER, b"me")]))
    settings = LeaderEpochSettings(controller="here", heartbeat_s=1.0, node_lease_s=3.0, private=True)
    epoch = LeaderEpoch(store, fence, settings, lambda job: None)
    await epoch.load()
    return epoch


async def test_a_live_job_keeps_its_newest_runs_and_of_a_run_its_first_and_newest_plans(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A job is restarted again and again, each run planned anew again and again: all of it once stayed as long as$
    the job. 2. The next leader finds the newest runs, and of the newest one the first plan and the newest."""
    monkeypatch.setattr("atoll.controller.jobs.records.retention.KEPT_RUNS", 3)
    monkeypatch.setattr("atoll.controller.jobs.records.retention.KEPT_PLANS", 4)
    epoch = await epoch_of(store)
    await store.commit([Put(keys.job(JOB), encode(job(JobPhase.QUEUED, run=0)))])
    await epoch.ledger.load()
    ledger = epoch.ledger
    state = ledger.jobs[JOB]
    for number in range(1, 8):
        started = replace(state.job, status=replace(state.job.status, phase=JobPhase.RUNNING, run=number))
        plan = first_plan(number, "even", [Place("a", 0, 1.0)], {}, 0)
        placement = PlacementRecord(run=number, reason="", input="", output="")
        await ledger.write(state, JobStep(started, run("a", number=number), plan, placement=placement))
        for id in range(2, 10):
            await ledger.write(state, JobStep(state.job, state.run, replace(plan, id=id)))
    assert await stored(store, keys.runs_prefix(JOB)) == [keys.run(JOB, number) for number in (5, 6, 7)]
    assert await stored(store, keys.placements_prefix(JOB)) == [keys.placement(JOB, number) for number in (5, 6, 7)]
    plans = [keys.plan(JOB, number, id) for number in (5, 6, 7) for id in (1, 6, 7, 8, 9)]
    assert await stored(store, keys.plans_prefix(JOB)) == plans
    read = Ledger(store, ledger.fence, lambda: None)
    await read.load()
    assert [plan.id for plan in read.jobs[JOB].plans] == [plan.id for plan in state.plans] == [1, 6, 7, 8, 9]


async def test_code_that_no_job_uses_does_not_stay(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A Submit is refused, as too many jobs live: its code is not stored at all; it once stayed for ever. 2. Another
    one's code is stored, but not the job. The next Submit removes it, or the next leader. 3. Jobs with the same code
    write it once: each once left another copy in etcd's history."""
    spec_of = {n: spec(code_sha256=hashlib.sha256(CODE + bytes([n])).hexdigest()) for n in range(4)}
    epoch = await epoch_of(store)
    monkeypatch.setattr("atoll.controller.jobs.records.ledger.MAX_LIVE_JOBS", 0)
    with pytest.raises(Conflict, match="Cancel some first"):
        await epoch.submit(spec_of[0], "r0", CODE + bytes([0]), by="alice")
    assert await stored(store, keys.CODES) == []
    monkeypatch.undo()

    async def broken_off(number: int) -> None:
        """All of its code is stored; the answer about the job's record is lost before it is asked for."""
        monkeypatch.setattr(epoch.ledger, "add", unavailable)
        with pytest.raises(StoreUnavailable):
            await epoch.submit(spec_of[number], f"r{number}", CODE + bytes([number]), by="alice")
        monkeypatch.undo()
        assert len(await stored(store, keys.code_prefix(spec_of[number].code_sha256))) == 3

    async def unavailable(*_: object) -> None:
        raise StoreUnavailable("etcd is away")

    await broken_off(1)
    name = await epoch.submit(spec_of[2], "r2", CODE + bytes([2]), by="alice")
    assert {keys.sha256_of_code(key) for key in await stored(store, keys.CODES)} == {spec_of[2].code_sha256}
    versions = [e.mod_revision for e in (await store.read_prefix(keys.CODES, keys_only=True)).entries.values()]
    again = await epoch.submit(spec_of[2], "r2-again", CODE + bytes([2]), by="alice")
    assert again != name
    after = [e.mod_revision for e in (await store.read_prefix(keys.CODES, keys_only=True)).entries.values()]
    assert after == versions
    await broken_off(3)
    await epoch_of(store)
    assert {keys.sha256_of_code(key) for key in await stored(store, keys.CODES)} == {spec_of[2].code_sha256}
    assert b"".join(await epoch.code.chunks(spec_of[2].code_sha256)) == CODE + bytes([2])
