"""What a job names as secrets: its workers get them, a new leader and a job alike too, and nobody is shown them."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc.aio
import pytest
from daemons import CALL_S, Controller, controller, leading
from fake_agent import FakeAgent
from identities import Certificates

from atoll.v1 import jobs_pb2 as pb

VALUE = "hunter2"


async def shown(head: Controller, job: str) -> bytes:
    """All that a client can have of a job."""
    nodes = await head.stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_S)
    plans = await head.stub.Plans(pb.PlansRequest(job=job), timeout=CALL_S)
    jobs = await head.stub.List(pb.ListRequest(all=True), timeout=CALL_S)
    watched = await head.phase(job, pb.PHASE_RUNNING)
    replies = [nodes, plans, jobs, watched, await head.get(job)]
    told = [*await head.events(job), *await head.events()]
    return b"".join(reply.SerializeToString() for reply in replies) + "".join(told).encode()


async def test_workers_get_them_and_nobody_is_shown_them(
    etcd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A job needs a token. In `env` every client reads it from `atoll status --json`. 2. As a secret it comes to the
    job's workers. 3. No reply, event or line of the log has it. 4. A new leader hands it out to the next run."""
    caplog.set_level(logging.DEBUG)
    made = Certificates(tmp_path / "authority")
    a = FakeAgent("a")
    async with controller(tmp_path / "one", etcd, client_tls=made.alice, tls=made.controller) as one:
        await leading(one)
        await a.connect(one.address, made.a)
        job = await one.submit(secrets={"TOKEN": VALUE}, env={"SEEN": "by all"})
        await a.running(job, 1)
        assert a.launches[0].spec.secrets == {"TOKEN": VALUE}
        assert (await one.get(job)).spec.secrets == {"TOKEN": ""}
        seen = await shown(one, job)
        await a.disconnect()
    assert b"by all" in seen
    assert VALUE.encode() not in seen
    a.workers.clear()  # its machine was started again
    async with controller(tmp_path / "two", etcd, client_tls=made.alice, tls=made.controller) as two:
        await leading(two)
        await a.connect(two.address, made.a)
        await a.running(job, 2)
        assert a.launches[-1].spec.secrets == {"TOKEN": VALUE}
        await a.disconnect()
    assert VALUE not in caplog.text


async def test_a_job_alike_has_those_of_the_other_one(etcd: str, tmp_path: Path) -> None:
    """`atoll restore` names them and knows no value; what it does know takes the other's place."""
    a = FakeAgent("a", devices=2)
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        await a.connect(head.address)
        job = await head.submit(secrets={"TOKEN": VALUE, "OTHER": "x"})
        spec = (await head.get(job)).spec
        spec.secrets["OTHER"] = "y"
        header = pb.SubmitHeader(spec=spec, request_id="again", code_of=job)
        again = await head.stub.Submit(iter([pb.SubmitRequest(header=header)]), timeout=CALL_S)
        await a.running(again.job, 1)
        launch = next(launch for launch in a.launches if launch.id.job == again.job)
        assert launch.spec.secrets == {"TOKEN": VALUE, "OTHER": "y"}
        spec.secrets["NEW"] = ""
        header = pb.SubmitHeader(spec=spec, request_id="third", code_of=job)
        with pytest.raises(grpc.aio.AioRpcError, match="secrets.NEW = '' is empty"):
            await head.stub.Submit(iter([pb.SubmitRequest(header=header)]), timeout=CALL_S)
        await a.disconnect()


async def test_where_others_could_read_along_they_are_refused_and_not_handed_out(etcd: str, tmp_path: Path) -> None:
    """1. A controller with certificates took a job with a secret. 2. One with `--insecure` leads after it. 3. It hands
    the secret to nobody, for it would cross the network in the clear, and takes no other such job."""
    made = Certificates(tmp_path / "authority")
    async with controller(tmp_path / "one", etcd, client_tls=made.alice, tls=made.controller) as one:
        job = await (await leading(one)).submit(secrets={"TOKEN": VALUE})
    everywhere = {"listen": "0.0.0.0:0", "insecure": True}
    async with controller(tmp_path / "two", etcd, **everywhere) as two:
        await leading(two)
        a = await FakeAgent("a").connect(two.address)
        await a.running(job, 1)
        assert a.launches[0].spec.secrets == {"TOKEN": ""}
        with pytest.raises(grpc.aio.AioRpcError, match="without TLS, where anyone on the way could read them"):
            await two.submit(secrets={"TOKEN": VALUE})
        await a.disconnect()
