"""Volunteers over real gRPC: with which token they join, what they are given, and what they cannot do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from daemons import CALL_S, Controller, controller, leading
from fake_agent import FakeAgent
from identities import NOW, Certificates

from atoll.network.rpc import Tls, open_channel
from atoll.security.certificates import identity, issue_volunteer
from atoll.security.volunteer_ticket import is_ticket, token
from atoll.v1 import agents_pb2, common_pb2
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.agents_pb2_grpc import AgentServiceStub
from atoll.v1.jobs_pb2_grpc import JobServiceStub

JOIN_TOKEN = "correct-horse-battery-staple"


def agent_with(name: str, shown: str, *, volunteer: bool) -> FakeAgent:
    made = FakeAgent(name)
    made.register.token, made.register.volunteer = shown, volunteer
    return made


async def refusal(agent: FakeAgent, address: str, tls: Tls | None = None) -> str:
    """Connect once more where gRPC lost the refusal to a write that came after it, as the real agent does.

    Story: https://github.com/grpc/grpc/issues/36066; once in some hundred runs of this file."""
    for _ in range(5):
        await agent.connect(address, tls)
        await agent.disconnect()
        assert agent.failure is not None
        if agent.failure.code() != grpc.StatusCode.INTERNAL:
            break
    return f"{agent.failure.code().name}: {agent.failure.details()}"


@pytest.fixture
async def head(etcd: str, tmp_path: Path) -> AsyncIterator[Controller]:
    (tmp_path / "token").write_text(JOIN_TOKEN)
    async with controller(tmp_path / "data", etcd, token_file=tmp_path / "token") as one:
        yield await leading(one)


async def test_a_volunteers_token_is_good_for_its_name_and_for_nothing_but_help(head: Controller) -> None:
    own = token(JOIN_TOKEN, "v")
    said = await refusal(agent_with("v", own, volunteer=False), head.address)
    assert said == "UNAUTHENTICATED: the join token is a volunteer's. Start the agent with --volunteer"
    for agent in (
        agent_with("w", own, volunteer=True),
        agent_with("w", own, volunteer=False),
        agent_with("v", own[:-1], volunteer=True),
        agent_with("v", "", volunteer=True),
    ):
        assert "UNAUTHENTICATED: the join token is wrong" in await refusal(agent, head.address)
    for shown in (own, JOIN_TOKEN):  # the cluster's own is good for all of its owner's machines
        right = await agent_with("v", shown, volunteer=True).connect(head.address)
        assert right.failure is None
        await right.disconnect()
        await head.left("v")


async def test_a_volunteer_is_no_rank_and_helps_who_takes_help(head: Controller) -> None:
    """1. Two jobs wait, and a volunteer comes: neither starts on it. 2. An ordinary node comes: both run, one after the
    other. 3. Of the one with strategy volunteer the rank says where it takes help: the volunteer is sent there, with a
    ticket, and without the job's secrets. 4. It dies and is forgotten: it is sent there again, under a number of its
    own. 5. The run is over: it is stopped."""
    dense = await head.submit()
    job = await head.submit(strategy="volunteer", secrets={"KEY": "of the ranks"})
    v = agent_with("v", JOIN_TOKEN, volunteer=True)
    v.register.memory_bytes, v.register.shards_port, v.register.shards_key = 2**30, 5999, bytes(32)
    await v.connect(head.address)
    a = await agent_with("a", JOIN_TOKEN, volunteer=False).connect(head.address)
    await a.running(dense, 1)
    assert not v.launches
    await a.end((dense, 1, 0))
    await a.running(job, 1)
    assert not v.launches
    (rank,) = (one for one in a.launches if one.id.job == job)
    a.workers[job, 1, 0].volunteer_port = 5007
    await a.beat()
    await v.until(lambda: len(v.launches) == 1)
    (launch,) = v.launches
    helping = launch.helping
    assert (launch.world_size, helping.name, helping.address, helping.port) == (1, "v/0", "127.0.0.1", 5007)
    assert helping.public_key == rank.keys.public[0]
    assert is_ticket(rank.keys.volunteers, "v/0", helping.ticket)
    assert not is_ticket(rank.keys.volunteers, "a/0", helping.ticket)
    assert not launch.HasField("keys")
    assert dict(launch.spec.secrets) == {"KEY": ""}
    assert launch.spec.checkpoint.memory_replicas == 0
    first = (job, 1, launch.id.rank)
    await v.end(first, common_pb2.EXIT_KIND_SIGNALLED, -9)
    await v.until(lambda: first in v.forgotten and len(v.launches) > 1)
    assert v.launches[-1].id.rank != launch.id.rank
    await a.end((job, 1, 0))
    await v.until(lambda: any(one.job == job and list(one.ranks) == [v.launches[-1].id.rank] for one in v.stopped))
    nodes = (await head.stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_S)).nodes
    (shown,) = (one for one in nodes if one.name == "v")
    assert shown.volunteer
    await v.disconnect()
    await a.disconnect()


async def test_a_helper_that_fails_rests_and_an_event_says_why(head: Controller) -> None:
    job = await head.submit(strategy="volunteer")
    v = await agent_with("v", JOIN_TOKEN, volunteer=True).connect(head.address)
    a = await agent_with("a", JOIN_TOKEN, volunteer=False).connect(head.address)
    await a.running(job, 1)
    a.workers[job, 1, 0].volunteer_port = 5007
    await a.beat()
    await v.until(lambda: len(v.launches) == 1)
    key = (job, 1, v.launches[0].id.rank)
    await v.end(key, common_pb2.EXIT_KIND_FAILED, 1, "ModuleNotFoundError: no torch")
    await v.until(lambda: key in v.forgotten and len(v.launches) == 2)
    events = await head.events("")
    assert f"volunteer v/0 could not help {job}: ModuleNotFoundError: no torch; it tries again in 2 s" in events
    await v.disconnect()
    await a.disconnect()


async def test_a_volunteers_certificate_lets_it_help_and_nothing_else(etcd: str, tmp_path: Path) -> None:
    """1. It asks for jobs, to be a node, for code: refused. 2. Of a job that takes help it gets the code."""
    made = Certificates(tmp_path / "ca")
    own = issue_volunteer(made.folder, "v", NOW)
    v = identity(own)
    async with controller(tmp_path / "data", etcd, client_tls=made.alice, tls=made.controller) as head:
        await leading(head)
        said = await refusal(agent_with("v", "", volunteer=False), head.address, v)
        assert "PERMISSION_DENIED: the certificate of 'v' is a volunteer's" in said
        right = await agent_with("v", (own / "token").read_text().strip(), volunteer=True).connect(head.address, v)
        assert right.failure is None
        async with open_channel(head.address, v) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await JobServiceStub(channel).List(pb.ListRequest(), timeout=CALL_S)
            for strategy, gets in (("dense", False), ("volunteer", True)):
                job = await head.submit(strategy=strategy)
                a = await FakeAgent("a").connect(head.address, made.a)
                await a.running(job, 1)
                sha256 = a.launches[-1].spec.code_sha256
                fetch = AgentServiceStub(channel).FetchCode(agents_pb2.FetchCodeRequest(sha256=sha256), timeout=CALL_S)
                if gets:
                    assert (await fetch.read()).data  # type: ignore[union-attr]
                else:
                    with pytest.raises(grpc.aio.AioRpcError, match="and of no others"):
                        await fetch.read()
                await a.end((job, 1, 0))
                await head.phase(job, pb.PHASE_DONE)
                await a.disconnect()
                await head.left("a")
        await right.disconnect()
