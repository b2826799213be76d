"""With certificates: who may call what, by the name in the certificate. Certificates are those of `atoll certs`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from daemons import CALL_S, Controller, controller, leading
from fake_agent import FakeAgent
from identities import Certificates

from atoll.cli.render.views import status_lines
from atoll.network.rpc import Tls, open_channel
from atoll.v1 import agents_pb2
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.agents_pb2_grpc import AgentServiceStub
from atoll.v1.jobs_pb2_grpc import JobServiceStub


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture
async def head(etcd: str, tmp_path: Path, made: Certificates) -> AsyncIterator[Controller]:
    async with controller(tmp_path, etcd, client_tls=made.alice, tls=made.controller) as one:
        yield await leading(one)


async def list_jobs(address: str, tls: Tls | None) -> grpc.StatusCode:
    async with open_channel(address, tls) as channel:
        try:
            await JobServiceStub(channel).List(pb.ListRequest(), timeout=CALL_S, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_clients_list_and_agents_run_and_neither_does_the_others_part(
    head: Controller, made: Certificates
) -> None:
    job = await head.submit()
    a = await FakeAgent("a").connect(head.address, made.a)
    assert a.failure is None
    await head.phase(job, pb.PHASE_RUNNING)
    await a.end((job, 1, 0))
    await head.phase(job, pb.PHASE_DONE)
    await a.disconnect()
    assert await list_jobs(head.address, made.a) == grpc.StatusCode.PERMISSION_DENIED
    assert await list_jobs(head.address, made.controller) == grpc.StatusCode.UNAVAILABLE  # it serves, it calls none
    intruder = await FakeAgent("a").connect(head.address, made.alice)
    assert intruder.failure is not None
    assert intruder.failure.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "'client:alice' may not call this: it takes one of \"agent:NAME\"" in (intruder.failure.details() or "")
    await intruder.disconnect()
    async with open_channel(head.address, made.alice) as channel:
        fetch = AgentServiceStub(channel).FetchCode(agents_pb2.FetchCodeRequest(sha256="0" * 64), timeout=CALL_S)
        with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
            await fetch.read()


async def test_who_submitted_adjusted_and_cancelled_is_recorded_and_shown(head: Controller, made: Certificates) -> None:
    """1. Two people share a cluster; a job of one ends. 2. Nothing said who had cancelled it, or started it."""
    job = await head.submit(strategy="stale-sparse")
    a = await FakeAgent("a").connect(head.address, made.a)
    await head.phase(job, pb.PHASE_RUNNING)
    async with open_channel(head.address, made.bob) as channel:
        bob = JobServiceStub(channel)
        await bob.Adjust(pb.AdjustRequest(job=job, strategy_params='{"sparsity":0.5}'), timeout=CALL_S)
        await bob.Cancel(pb.CancelRequest(job=job), timeout=CALL_S)
    await head.stub.Cancel(pb.CancelRequest(job=job), timeout=CALL_S)  # the first counts
    shown = await head.phase(job, pb.PHASE_CANCELLED)
    await a.disconnect()
    assert (shown.submitted_by, shown.cancelled_by) == ("client:alice", "client:bob")
    lines = status_lines(shown, shown.ended_unix_s)
    assert "ago (client:alice), took" in lines[1]
    assert "cancel requested (client:bob)" in lines
    events = await head.events(job)
    assert events[0].startswith("submitted (client:alice): train.py")
    assert any(event.endswith("→ 0.5 (asked by client:bob)") for event in events)
    assert events.count("cancel requested (client:bob)") == 1


async def test_an_agent_registers_only_as_itself(head: Controller, made: Certificates) -> None:
    other = await FakeAgent("b").connect(head.address, made.a)
    assert other.failure is not None
    assert other.failure.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "the certificate is of agent 'a', it may not register as 'b'" in (other.failure.details() or "")
    await other.disconnect()


async def test_no_certificate_and_those_of_another_authority_get_nowhere(
    head: Controller, made: Certificates, tmp_path: Path
) -> None:
    assert await list_jobs(head.address, None) == grpc.StatusCode.UNAVAILABLE
    stranger = Certificates(tmp_path / "theirs").alice
    mixed = Tls(ca=made.alice.ca, certificate=stranger.certificate, key=stranger.key)
    assert await list_jobs(head.address, mixed) == grpc.StatusCode.UNAVAILABLE
    assert await list_jobs(head.address, made.alice) == grpc.StatusCode.OK
