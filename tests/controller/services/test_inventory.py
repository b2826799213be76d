"""JobService.Checkpoints over real gRPC, and Submit with another job's code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from daemons import CALL_S, Controller, bundle, controller, leading, spec_for
from fake_agent import FakeAgent

from atoll.controller.services import inventory as inventory_service
from atoll.controller.state.etcd import EtcdStore
from atoll.v1 import common_pb2
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.agents_pb2 import HeldCheckpoint, Inventory

URL = "s3://bucket/vit"


@pytest.fixture
async def head(etcd: str, tmp_path: Path) -> AsyncIterator[Controller]:
    async with controller(tmp_path, etcd) as one:
        yield await leading(one)


async def ask(head: Controller, job: str) -> pb.CheckpointsReply:
    return await head.stub.Checkpoints(pb.CheckpointsRequest(job=job), timeout=CALL_S)  # type: ignore[no-any-return]


async def test_every_node_is_asked_one_looks_into_the_store_and_who_is_silent_or_gone_is_named(
    head: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Three nodes, the job trains on two. 2. All answer. 3. One does not, one is gone: the rest is shown."""
    agents = {name: await FakeAgent(name).connect(head.address) for name in ("a", "b", "c")}
    try:
        policy = common_pb2.CheckpointPolicy(directory=URL, every_steps=10, keep=1)
        job = await head.submit((3, 3), checkpoint=policy)
        await head.phase(job, pb.PHASE_RUNNING)
        agents["a"].inventory = Inventory(disk=[HeldCheckpoint(run=1, step=10, bytes=5, path="/x/step-10")])
        agents["c"].inventory = Inventory(troubles=["/x cannot be looked at: Permission denied"])
        reply = await ask(head, job)
        assert [(row.tier, row.step, list(row.nodes)) for row in reply.checkpoints] == [("disk", 10, ["a"])]
        assert list(reply.notes) == ["node c: /x cannot be looked at: Permission denied"]
        asked = [looked for agent in agents.values() for looked in agent.looked]
        assert [(one.job, one.directory) for one in asked] == [(job, URL)] * 3
        assert sum(one.store for one in asked) == 1
        agents["b"].inventory = None
        await agents["c"].disconnect()
        await head.left("c")
        monkeypatch.setattr(inventory_service, "STORE_ANSWER_S", 0.3)
        notes = " ".join((await ask(head, job)).notes)
        assert "node b did not answer" in notes
        assert "node c is gone" in notes
    finally:
        for agent in agents.values():
            await agent.disconnect()


async def test_a_job_may_take_another_ones_code_and_only_one_that_is_there(head: Controller) -> None:
    code = bundle({"train.py": b"print('hello')\n"})
    first = await head.submit_raw(spec_for(code), [code], "first")

    async def header(of: str) -> AsyncIterator[pb.SubmitRequest]:
        spec = spec_for(b"")
        spec.name = "second"
        yield pb.SubmitRequest(header=pb.SubmitHeader(spec=spec, request_id=f"r-{of}", code_of=of))

    second = (await head.stub.Submit(header(first), timeout=CALL_S)).job
    assert second.startswith("second-")
    assert (await head.get(second)).spec.code_sha256 == (await head.get(first)).spec.code_sha256
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await head.stub.Submit(header("nobody"), timeout=CALL_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_job_that_is_over_is_removed_with_all_that_is_its_own(
    etcd: str, head: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. It trains: it cannot be removed. 2. It is cancelled; a job that began with its checkpoints lives, so it cannot
    be removed yet. 3. A node cannot remove what it has: the job stays, and says why. 4. It can: records and events are
    gone, an event of the cluster tells, and nothing of other jobs is touched. 5. Another one goes and
    leaves its checkpoints."""
    monkeypatch.setattr(inventory_service, "REMOVE_ANSWER_S", 20.0)
    agents = {name: await FakeAgent(name).connect(head.address) for name in ("a", "b")}
    store = EtcdStore([etcd], None)

    async def remove(job: str, *, keep: bool = False) -> pb.RemoveReply:
        return await head.stub.Remove(pb.RemoveRequest(job=job, keep_checkpoints=keep), timeout=CALL_S)  # type: ignore[no-any-return]

    async def cancel(job: str) -> None:
        await head.stub.Cancel(pb.CancelRequest(job=job), timeout=CALL_S)
        await head.phase(job, pb.PHASE_CANCELLED)

    async def refused(job: str) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await remove(job)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        return caught.value.details() or ""

    try:
        job = await head.submit((2, 2))
        await head.phase(job, pb.PHASE_RUNNING)
        assert f"is running; only ended jobs can be removed. `atoll cancel {job}` ends it" in await refused(job)
        await cancel(job)
        start = common_pb2.StartFrom(job=job)
        heir = await head.submit((2, 2), checkpoint=common_pb2.CheckpointPolicy(keep=1, start_from=start))
        assert f"job {heir} began with its checkpoints" in await refused(job)
        await cancel(heir)
        agents["b"].inventory = Inventory(troubles=["/x cannot be removed: Permission denied"])
        assert f"job {job} stays" in (why := await refused(job))
        assert "node b: /x cannot be removed: Permission denied" in why
        assert all(agent.looked[-1].remove for agent in agents.values())
        agents["b"].inventory = Inventory()
        reply = await remove(job)
        assert (reply.job, list(reply.notes)) == (job, [])
        left = (await store.read_prefix("/atoll/", keys_only=True)).entries
        assert [key for key in left if job in key] == []
        assert any(heir in key for key in left)
        with pytest.raises(grpc.aio.AioRpcError, match="no job"):
            await head.stub.Get(pb.GetRequest(job=job), timeout=CALL_S)
        told = [event.text async for event in head.stub.Events(pb.EventsRequest(), timeout=CALL_S)]
        assert f"job {job}, cancelled, was removed (unauthenticated)" in told
        agents["b"].inventory = Inventory(disk=[HeldCheckpoint(run=1, step=10, bytes=5, path="/x/step-10")])
        await remove(heir, keep=True)
        assert all(agent.looked[-1].keep_checkpoints for agent in agents.values())
    finally:
        await store.close()
        for agent in agents.values():
            await agent.disconnect()
