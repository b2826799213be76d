"""AgentService over real gRPC: who is let in, what is refused, and plans that follow from telemetry."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from daemons import CALL_S, Controller, bundle, controller, leading
from fake_agent import FakeAgent

from atoll.controller.planners.registry import PLANNERS
from atoll.controller.services.checks import check_telemetry
from atoll.controller.state import keys
from atoll.controller.state.codec import decode
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.records import PlanRecord
from atoll.errors import BadInput
from atoll.network.rpc import open_channel
from atoll.v1 import agents_pb2, common_pb2
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.agents_pb2_grpc import AgentServiceStub

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
async def head(etcd: str, tmp_path: Path) -> AsyncIterator[Controller]:
    async with controller(tmp_path, etcd) as one:
        yield await leading(one)


async def refused(agent: FakeAgent, address: str) -> tuple[grpc.StatusCode, str]:
    await agent.connect(address)
    await agent.disconnect()
    assert agent.failure is not None
    return agent.failure.code(), agent.failure.details() or ""


async def test_an_agent_is_told_who_leads_and_how_often_to_report(head: Controller) -> None:
    a = await FakeAgent("a").connect(head.address)
    assert a.registered is not None
    assert (a.registered.controller, a.registered.heartbeat_s, a.registered.lease_s) == (head.address, 0.2, 2.0)
    await a.disconnect()


async def test_two_agents_with_one_name(head: Controller) -> None:
    """1. The second is refused and the first keeps its place. 2. `atoll events` says so, once. 3. When the first has
    gone, the second may come."""
    first = await FakeAgent("a").connect(head.address)
    second = FakeAgent("a")
    for _ in range(2):
        code, text = await refused(second, head.address)
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert text.startswith("another agent named 'a' is connected, from 127.0.0.1. Give this one another --name")
    assert first.failure is None
    await said(head, "another agent named 'a'", times=1)
    await first.disconnect()
    await head.left("a")
    await second.connect(head.address)
    assert second.failure is None
    await second.disconnect()


async def test_the_same_agent_may_come_again_before_its_old_stream_is_noticed_to_be_gone(head: Controller) -> None:
    old = await FakeAgent("a").connect(head.address)
    new = FakeAgent("a")
    new.register.session = old.session
    await new.connect(head.address)
    assert new.failure is None
    await old.until(lambda: old.failure is not None)
    await asyncio.gather(old.disconnect(), new.disconnect())


async def test_a_wrong_token_is_refused_and_written_nowhere(
    etcd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    async with controller(tmp_path / "data", etcd, token_file=token_file) as head:
        await leading(head)
        for token in ("", "guessed-token"):
            agent = FakeAgent("a")
            agent.register.token = token
            code, text = await refused(agent, head.address)
            assert code == grpc.StatusCode.UNAUTHENTICATED
            assert text == "the join token is wrong. Give the agent the controller's with --token-file"
        right = FakeAgent("a")
        right.register.token = TOKEN
        await right.connect(head.address)
        assert right.failure is None
        await right.disconnect()
    assert TOKEN not in caplog.text
    assert "guessed-token" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protocol": 2}, "register.protocol = 2: this controller speaks 1"),
        ({"name": "../a"}, "register.name = '../a' must be"),
        ({"name": "x" * 64}, "register.name"),
        ({"session": ""}, "register.session"),
        ({"address": "not a host"}, "register.address = 'not a host' is no host"),
        ({"island": "x" * 5000}, "register.island = 'xxx"),
        ({"links_port": 80, "links_secret": bytes(32)}, "register.links_port = 80 with a secret of 32 bytes must be"),
        ({"links_port": 20_000, "links_secret": b"x"}, "register.links_port = 20000 with a secret of 1 bytes must be"),
        ({"rack": "a/b"}, "register.rack = 'a/b' must be 1 to 63"),
        ({"devices": []}, "register.devices has 0 entries"),
        ({"devices": [common_pb2.Device(kind="tpu", speed=1.0)]}, "kind = 'tpu' must be one of cuda, cpu"),
        ({"devices": [common_pb2.Device(kind="cpu", speed=0.0)]}, "speed = 0.0 must be above 0"),
        ({"devices": [common_pb2.Device(kind="cpu", speed=1.0)] * 2}, "one index twice"),
        ({"devices": [common_pb2.Device(kind="cpu", speed=1.0, work_per_s=-1.0)]}, "work_per_s = -1.0 must be between"),
        ({"devices": [common_pb2.Device(kind="cpu", speed=1.0, work_per_s=float("nan"))]}, "work_per_s = nan must be"),
        ({"devices": [common_pb2.Device(kind="cuda", speed=1.0, sharers=65)]}, "sharers = 65 must be at most 64"),
        ({"rendezvous_ports": [70000]}, "rendezvous_ports"),
        ({"unix_s": float("nan")}, "register.unix_s = nan"),
        ({"workers": [common_pb2.WorkerStatus(id=common_pb2.WorkerId(job="../x", run=1))]}, "is no worker's id"),
    ],
)
async def test_a_bad_register_is_refused_by_field(
    etcd: str, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        async with open_channel(head.address, None) as channel:
            register = FakeAgent("a").register
            for field in fields:
                register.ClearField(field)  # type: ignore[arg-type]
            register.MergeFrom(agents_pb2.Register(**fields))
            call = AgentServiceStub(channel).Connect(iter([agents_pb2.AgentMessage(register=register)]), timeout=CALL_S)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in (error.value.details() or "")


@pytest.mark.parametrize(
    "message",
    [
        agents_pb2.AgentMessage(),
        agents_pb2.AgentMessage(register=agents_pb2.Register()),
        agents_pb2.AgentMessage(log=agents_pb2.LogBatch(id=common_pb2.WorkerId(job="a-1", run=1), data=bytes(300_000))),
        agents_pb2.AgentMessage(
            telemetry=agents_pb2.Telemetry(
                workers=[
                    agents_pb2.WorkerTelemetry(
                        id=common_pb2.WorkerId(job="a-1", run=1), steps=[common_pb2.StepSample()] * 300
                    )
                ]
            )
        ),
        agents_pb2.AgentMessage(
            heartbeat=agents_pb2.Heartbeat(workers=[common_pb2.WorkerStatus(id=common_pb2.WorkerId(job="a", run=0))])
        ),
    ],
    ids=["empty", "second register", "large log", "many steps", "bad id"],
)
async def test_a_bad_message_ends_the_stream_and_nothing_else(
    head: Controller, message: agents_pb2.AgentMessage
) -> None:
    a = await FakeAgent("a").connect(head.address)
    await a.send(message)
    await a.until(lambda: a.failure is not None)
    assert a.failure is not None
    assert a.failure.code() == grpc.StatusCode.INVALID_ARGUMENT
    await a.disconnect()
    await a.connect(head.address)
    assert a.failure is None
    await a.disconnect()


@pytest.mark.parametrize(
    "step",
    [
        common_pb2.StepSample(backward_s=float("nan")),
        common_pb2.StepSample(last_sync_s=-0.1),
        common_pb2.StepSample(local_grad_sqnorm=float("inf")),
        common_pb2.StepSample(strategy_metrics={"fresh_share": 1.1}),
        common_pb2.StepSample(strategy_metrics={"sparsity": float("nan")}),
        common_pb2.StepSample(strategy_metrics={"colour": 1.0}),
    ],
    ids=lambda step: next(field.name for field, _ in step.ListFields()),
)
def test_a_step_that_makes_no_sense_is_refused_by_field(step: common_pb2.StepSample) -> None:
    field = next(field.name for field, _ in step.ListFields())
    id_ = common_pb2.WorkerId(job="a-1", run=1)
    report = agents_pb2.WorkerTelemetry(id=id_, steps=[common_pb2.StepSample(step=1, step_s=0.1), step])
    with pytest.raises(BadInput, match=rf"steps\.{field}(\.\w+)? = "):
        check_telemetry(agents_pb2.Telemetry(workers=[report]))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([common_pb2.DeviceSample(index=n) for n in range(65)], "has 65 entries"),
        ([common_pb2.DeviceSample()] * 2, "one index twice"),
        ([common_pb2.DeviceSample(utilisation=1.5)], "utilisation = 1.5 must be 0 to 1"),
        ([common_pb2.DeviceSample(temperature_c=float("nan"))], "temperature_c = nan"),
    ],
)
def test_samples_of_devices_that_make_no_sense_are_refused(
    devices: list[common_pb2.DeviceSample], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        check_telemetry(agents_pb2.Telemetry(devices=devices))


async def test_how_a_nodes_devices_do_is_in_the_list_of_nodes(head: Controller) -> None:
    a = await FakeAgent("a", devices=2).connect(head.address)
    samples = [common_pb2.DeviceSample(index=0, utilisation=0.75, temperature_c=-3), common_pb2.DeviceSample(index=1)]
    await a.send(agents_pb2.AgentMessage(telemetry=agents_pb2.Telemetry(devices=samples)))

    async def told() -> list[common_pb2.DeviceSample]:
        reply = await head.stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_S)
        return [sample for node in reply.nodes for sample in node.samples]

    async with asyncio.timeout(30):
        while await told() != samples:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await a.disconnect()


async def test_dropped_measurements_are_counted_by_rank_and_are_one_event(head: Controller) -> None:
    a = await FakeAgent("a", devices=2).connect(head.address)
    job = await head.submit((2, 2))
    await head.phase(job, pb.PHASE_RUNNING)
    for rank, dropped in ((1, 7), (0, 4), (1, 9)):
        report = agents_pb2.WorkerTelemetry(id=common_pb2.WorkerId(job=job, run=1, rank=rank), dropped_steps=dropped)
        await a.send(agents_pb2.AgentMessage(telemetry=agents_pb2.Telemetry(workers=[report])))
    async with asyncio.timeout(30):
        while [w.dropped_steps for w in (await head.get(job)).workers] != [4, 9]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while not (found := [text for text in await head.events(job) if "were dropped on their way" in text]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    (event,) = found
    assert event.startswith("rank 1: measurements of 7 steps")
    await a.disconnect()


async def test_a_clock_that_is_a_day_off_is_told_and_harms_nothing(head: Controller) -> None:
    a = FakeAgent("a")
    a.register.unix_s = time.time() - 86_400
    await a.connect(head.address)
    off_s = time.time() - a.register.unix_s  # what it took to come is told, too
    assert a.failure is None
    (line,) = await said(head, "node a's clock is ", times=1)
    told = re.match(r"node a's clock is (\d+) s behind the controller's", line)
    assert told is not None
    assert 86_400 <= int(told[1]) <= round(off_s)
    await a.disconnect()


async def said(head: Controller, text: str, times: int) -> list[str]:
    """Wait until the cluster's events have `text`, and check how often."""
    async with asyncio.timeout(30):
        while not (found := [line for line in await head.events() if text in line]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert len(found) == times
    return found


async def test_code_comes_back_as_it_was_sent(head: Controller) -> None:
    code = bundle({"train.py": b"", "random": bytes(range(256)) * 10})
    job = await head.submit()
    sha256 = (await head.get(job)).spec.code_sha256
    async with open_channel(head.address, None) as channel:
        fetch = AgentServiceStub(channel).FetchCode
        chunks = fetch(agents_pb2.FetchCodeRequest(sha256=sha256), timeout=CALL_S)
        got = b"".join([chunk.data async for chunk in chunks])
        assert got == bundle({"train.py": b"print('hello')\n"})
        for wrong, code_ in (("x", grpc.StatusCode.INVALID_ARGUMENT), ("0" * 64, grpc.StatusCode.NOT_FOUND)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await fetch(agents_pb2.FetchCodeRequest(sha256=wrong), timeout=CALL_S).read()
            assert error.value.code() == code_
    assert code != got


async def test_unequal_speeds_make_a_plan_that_etcd_can_derive_again(etcd: str, head: Controller) -> None:
    """1. Rank 1 takes three times as long for its half. 2. Both agents get plan 2, once. 3. What etcd holds of it gives
    the same bytes again. 4. An agent that comes back is told it again."""
    a = await FakeAgent("a").connect(head.address)
    b = await FakeAgent("b").connect(head.address)
    job = await head.submit((2, 2))
    await head.phase(job, pb.PHASE_RUNNING)
    for _ in range(2):  # again and again, as agents do
        await a.train((job, 1, 0), range(1, 20), local=32, total=64, compute_s=0.032, plan=1)
        await b.train((job, 1, 1), range(1, 20), local=32, total=64, compute_s=0.096, plan=1)
    await a.until(lambda: bool(a.plans))
    await b.until(lambda: bool(b.plans))
    plan = a.plans[0].plan
    assert (plan.id, plan.from_step, list(plan.shares)) == (2, 24, [48.0, 16.0])
    assert "device speeds 1.00 : 0.33: local batches 32/32 → 48/16" in plan.reason
    store = EtcdStore([etcd], None)
    entry = await store.read(keys.plan(job, 1, 2))
    await store.close()
    assert entry is not None
    record = decode(PlanRecord, entry.key, entry.value)
    assert PLANNERS[record.planner].run_json(record.input) == record.output
    assert json.loads(record.output)["batches"] == [48, 16]
    await b.disconnect()
    await b.connect(head.address)
    await b.until(lambda: len(b.plans) == 2)
    assert (len(a.plans), b.plans[1].plan.id) == (1, 2)
    await asyncio.gather(a.disconnect(), b.disconnect())


async def test_a_silent_agent_is_cut_off_and_its_job_goes_on_elsewhere(head: Controller) -> None:
    """A machine that stopped without closing its connection: no heartbeat comes any more."""
    a = await FakeAgent("a").connect(head.address)
    b = await FakeAgent("b").connect(head.address)
    job = await head.submit((1, 2))
    await a.until(lambda: bool(a.launched))
    a.heartbeat_s = 60
    await a.until(lambda: a.failure is not None)
    second = await head.phase(job, pb.PHASE_RUNNING, run=2)
    assert [worker.node for worker in second.workers] == ["b"]
    await asyncio.gather(a.disconnect(), b.disconnect())


async def test_an_agent_speaks_for_its_own_workers_only(head: Controller) -> None:
    """1. A job runs on node a. 2. Agent b sends output and notices in the name of its rank, of ranks and runs that are
    not there, and of a job that is not. 3. All is passed over; a's own words are kept."""
    a, b = await FakeAgent("a").connect(head.address), await FakeAgent("b").connect(head.address)
    await b.disconnect()
    await head.left("b")
    job = await head.submit()
    await a.running(job, 1)
    await b.connect(head.address)
    false = agents_pb2.Notice(level=common_pb2.LEVEL_ERROR, text="false")
    for key in ((job, 1, 0), (job, 1, 4000), (job, 9, 0), ("other-0000", 1, 0)):
        await b.log(key, 0, b"false\n")
        id = common_pb2.WorkerId(job=key[0], run=key[1], rank=key[2])
        report = agents_pb2.WorkerTelemetry(id=id, notices=[false], checkpoint_step=77)
        await b.send(agents_pb2.AgentMessage(telemetry=agents_pb2.Telemetry(workers=[report])))
    await a.log((job, 1, 0), 0, b"true\n")
    await b.log((job, 1, 0), 6, b"false\n")  # acknowledged after all the above was taken
    chunks = [chunk async for chunk in head.stub.Logs(pb.LogsRequest(job=job))]
    assert [(chunk.rank, chunk.data) for chunk in chunks] == [(0, b"true\n")]
    assert (await head.get(job)).checkpoint_step == 0
    assert not any("false" in line for line in await head.events(job))
    await asyncio.gather(a.disconnect(), b.disconnect())


async def test_an_agent_writes_no_output_of_older_runs_that_were_not_its_own(head: Controller) -> None:
    """1. Run 1 of a job is on node a, which is lost; run 2 is on node b. 2. b sends output in the name of run 1, which
    it had no part in. 3. a comes back and sends the last words of run 1. 4. Only a's words are in run 1's log."""
    a, b = await FakeAgent("a").connect(head.address), await FakeAgent("b").connect(head.address)
    await b.disconnect()
    await head.left("b")
    job = await head.submit()
    await a.running(job, 1)
    await head.phase(job, pb.PHASE_RUNNING)
    await b.connect(head.address)
    await a.disconnect()
    a.workers.clear()
    await b.running(job, 2)
    await b.log((job, 1, 0), 0, b"false\n")
    await a.connect(head.address)
    await a.log((job, 1, 0), 0, b"true\n")
    await b.log((job, 2, 0), 0, b"run 2\n")
    chunks = [chunk async for chunk in head.stub.Logs(pb.LogsRequest(job=job))]
    assert [(chunk.run, chunk.data) for chunk in chunks] == [(1, b"true\n"), (2, b"run 2\n")]
    await asyncio.gather(a.disconnect(), b.disconnect())


async def test_notices_become_events_of_the_job(head: Controller) -> None:
    a = await FakeAgent("a").connect(head.address)
    job = await head.submit()
    await a.running(job, 1)
    notice = agents_pb2.Notice(level=common_pb2.LEVEL_WARNING, text="the disk is full at step 4")
    report = agents_pb2.WorkerTelemetry(
        id=common_pb2.WorkerId(job=job, run=1, rank=0), notices=[notice], checkpoint_step=4, memory_step=6
    )
    await head.phase(job, pb.PHASE_RUNNING)
    await a.send(agents_pb2.AgentMessage(telemetry=agents_pb2.Telemetry(workers=[report])))
    async with asyncio.timeout(30):
        while "rank 0: the disk is full at step 4" not in await head.events(job):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while (await head.get(job)).memory_step == 0:  # noqa: ASYNC110 - written after the event, in a pass of its own
            await asyncio.sleep(0.05)
    found = await head.get(job)
    assert (found.checkpoint_step, found.memory_step) == (4, 6)
    await a.disconnect()


async def test_why_a_group_waited_is_an_event_of_the_job(head: Controller) -> None:
    """1. Of three replicas of strategy groups one takes far longer than the others, which are not answered until it
    connects them. 2. `atoll events` says for whom they waited; once, however often it happens meanwhile."""
    a = await FakeAgent("a", devices=3).connect(head.address)
    job = await head.submit((3, 3), strategy="groups", strategy_settings='{"history":3,"window_s":0.01}')
    await head.phase(job, pb.PHASE_RUNNING)

    async def trains(rank: int, iteration_s: float) -> None:
        for signal in itertools.count(1):
            await asyncio.sleep(iteration_s)
            await a.tell((job, 1, rank), json.dumps({"view": 1, "rank": rank, "workers": 3, "signal": signal}))
            await a.until(lambda: sum(one.id.rank == rank for one in a.answers) == signal)  # noqa: B023

    replicas = [asyncio.create_task(trains(rank, 0.5 if rank == 2 else 0.005)) for rank in range(3)]
    async with asyncio.timeout(60):
        while not (told := [text for text in await head.events(job) if "would not connect" in text]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for one in replicas:
        one.cancel()
    await asyncio.wait(replicas)
    (event,) = told
    said = r"stage 0, of \d+ groups: 1 waited [\d.]+ s in all for replica \d: without it the last 3 groups would not "
    assert re.match(said, event)
    await a.disconnect()


async def test_a_gpu_has_one_agent(head: Controller) -> None:
    """1. Two agents on one machine find the same GPU: it was a device of both, and two jobs trained on it. 2. The
    second is refused, by the GPU's name, with what to do; `atoll events` says so. 3. When the first has gone, it may
    come."""
    first, second = FakeAgent("a"), FakeAgent("b", devices=2)
    first.register.devices[0].uuid = "GPU-77"
    second.register.devices[1].uuid = "GPU-77"
    await first.connect(head.address)
    code, text = await refused(second, head.address)
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert text.startswith("GPU 1 of 'b' (fake, GPU-77) is GPU 0 of the agent 'a', from 127.0.0.1")
    assert "CUDA_VISIBLE_DEVICES" in text
    async for event in head.stub.Events(pb.EventsRequest(follow=True), timeout=CALL_S):
        if event.text == text:
            break
    await first.disconnect()
    await head.left("a")
    await second.connect(head.address)
    assert second.registered is not None
    await second.disconnect()


async def test_agents_share_a_gpu_by_agreement(head: Controller) -> None:
    """1. Three agents share a GPU, as each of them says. 2. One that wants it for itself, and a fourth, are refused."""
    agents = [FakeAgent(name) for name in "abcd"]
    for agent, sharers in zip(agents, (3, 3, 1, 3), strict=True):
        agent.register.devices[0].uuid, agent.register.devices[0].sharers = "GPU-77", sharers
    for agent in agents[:2]:
        await agent.connect(head.address)
        assert agent.registered is not None
    code, text = await refused(agents[2], head.address)
    assert (code, "Give this agent --share-gpu 3" in text) == (grpc.StatusCode.ALREADY_EXISTS, True)
    agents[2].register.devices[0].sharers = 3
    await agents[2].connect(head.address)
    assert agents[2].registered is not None
    _, text = await refused(agents[3], head.address)
    assert "3 agents may share it, and a, b, c do" in text
    nodes = (await head.stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_S)).nodes
    assert {node.name: node.devices[0].sharers for node in nodes} == {"a": 3, "b": 3, "c": 3}
    await asyncio.gather(*(agent.disconnect() for agent in agents[:3]))


async def test_a_disk_that_stands_still_holds_up_no_heartbeat(
    head: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The file that a worker's output goes to takes nothing (here another writes to it). 2. It was written on
    the event loop: no heartbeat was heard any more, no client answered. 3. Now only that output waits: the agent is
    there for three leases, and clients are answered. 4. The file takes it, and the agent is told that it is kept."""
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=60))  # else it fails after 5 s
    agent = await FakeAgent("a").connect(head.address)
    job = await head.submit(workers=(1, 1))
    await agent.running(job, 1)
    await agent.log((job, 1, 0), 0, b"before ")
    stuck = sqlite3.connect(tmp_path / "logs.sqlite3")
    stuck.execute("BEGIN IMMEDIATE")
    writing = asyncio.create_task(agent.log((job, 1, 0), 7, b"a line\n"))
    for _ in range(12):
        await asyncio.sleep(0.5)
        nodes = await head.stub.ListNodes(pb.ListNodesRequest(), timeout=30)
        assert [(node.name, node.connected) for node in nodes.nodes] == [("a", True)]
    assert not writing.done()
    stuck.rollback()
    stuck.close()
    await asyncio.wait_for(writing, 30)
    assert agent.acks[-1].offset == len(b"before a line\n")
    await agent.disconnect()
