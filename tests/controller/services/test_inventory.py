"""JobService.Checkpoints over real gRPC, and Submit with another job's code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from daemons import Controller, bundle, controller, leading, spec_for
from fake_agent import FakeAgent

from atoll.controller.services import inventory as inventory_service
from atoll.v1 import common_pb2
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.agents_pb2 import HeldCheckpoint, Inventory

URL = "s3://bucket/vit"


@pytest.fixture
async def head(etcd: str, tmp_path: Path) -> AsyncIterator[Controller]:
    async with controller(tmp_path, etcd) as one:
        yield await leading(one)


async def ask(head: Controller, job: str) -> pb.CheckpointsReply:
    return await head.stub.Checkpoints(pb.CheckpointsRequest(job=job), timeout=10)  # type: ignore[no-any-return]


async def test_every_node_is_asked_one_looks_into_the_store_and_who_is_silent_or_gone_is_named(
    head: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Three nodes, the job trains on two. 2. All answer. 3. One does not, one is gone: the rest is shown."""
    monkeypatch.setattr(inventory_service, "STORE_ANSWER_S", 0.3)
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

    second = (await head.stub.Submit(header(first), timeout=5)).job
    assert second.startswith("second-")
    assert (await head.get(second)).spec.code_sha256 == (await head.get(first)).spec.code_sha256
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await head.stub.Submit(header("nobody"), timeout=5)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
