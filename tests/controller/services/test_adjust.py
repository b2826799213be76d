"""Strategy stale-sparse over real gRPC: what launches carry, how the sparsity changes, and that keys stay secret."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from daemons import CALL_S, Controller, controller, leading
from fake_agent import FakeAgent

from atoll.cli.render.wire import to_plain
from atoll.controller.jobs.model.data_keys import private_key, public_keys
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state import keys
from atoll.controller.state.codec import decode
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.records import RunRecord
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.v1 import agents_pb2, common_pb2
from atoll.v1 import jobs_pb2 as pb

SPARSE = {"strategy": "stale-sparse", "strategy_settings": '{"sparsity":0.98}'}


@pytest.fixture
async def head(etcd: str, tmp_path: Path) -> AsyncIterator[Controller]:
    async with controller(tmp_path, etcd) as one:
        yield await leading(one)


async def two_agents(head: Controller) -> tuple[FakeAgent, FakeAgent]:
    a, b = FakeAgent("a"), FakeAgent("b")
    b.register.island = "lyon"
    await asyncio.gather(a.connect(head.address), b.connect(head.address))
    return a, b


async def adjust(head: Controller, job: str, sparsity: float | None = None) -> pb.Job:
    params = "" if sparsity is None else json.dumps({"sparsity": sparsity})
    return await head.stub.Adjust(pb.AdjustRequest(job=job, strategy_params=params), timeout=CALL_S)  # type: ignore[no-any-return]


async def refusal(head: Controller, job: str, sparsity: float | None = None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await adjust(head, job, sparsity)
    return refused.value.code(), refused.value.details() or ""


async def test_launches_carry_the_runs_members_and_each_rank_its_own_key(etcd: str, head: Controller) -> None:
    a, b = await two_agents(head)
    job = await head.submit((2, 2), **SPARSE)
    await head.phase(job, pb.PHASE_RUNNING)
    zero, one = a.launches[0], b.launches[0]
    assert [(m.rank, m.node, m.island) for m in zero.members] == [(0, "a", "here"), (1, "b", "lyon")]
    assert (zero.plan.strategy_params, zero.spec.strategy) == ('{"sparsity":0.98}', "stale-sparse")
    assert json.loads(zero.spec.strategy_settings) == StaleSparse(sparsity=0.98).said()  # what was left out, too
    run = await run_record(etcd, job, 1)
    assert [x.keys.secret for x in (zero, one)] == [private_key(run.data_seed, job, 1, rank) for rank in (0, 1)]
    assert tuple(zero.keys.public) == tuple(one.keys.public) == public_keys(run.data_seed, job, 1, 2)
    await asyncio.gather(a.disconnect(), b.disconnect())


async def test_a_dense_job_has_members_and_keys_for_a_later_strategy_and_no_sparsity(head: Controller) -> None:
    """Strategies that exchange need keys, and a run may change to one of them while it trains."""
    a = await FakeAgent("a").connect(head.address)
    job = await head.submit(checkpoint=common_pb2.CheckpointPolicy(memory_replicas=0))
    await head.phase(job, pb.PHASE_RUNNING)
    launch = a.launches[0]
    assert (len(launch.members), launch.HasField("keys"), launch.plan.strategy_params) == (1, True, "")
    assert await refusal(head, job, 0.99) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"job {job} of strategy dense: strategy_params.sparsity = 0.99 is not known. Known: none",
    )
    await a.disconnect()


async def test_a_sparsity_holds_from_the_next_step_on_all_agents_and_for_later_runs(head: Controller) -> None:
    """1. The job trains at 98 %. 2. A user asks for 99.5 %, twice: one plan. 3. A plan for unequal speeds keeps it.
    4. The run is lost; the next one begins with it, under a key of its own."""
    a, b = await two_agents(head)
    job = await head.submit((2, 2), **SPARSE)
    await head.phase(job, pb.PHASE_RUNNING)
    await a.train((job, 1, 0), range(8), local=32, total=64, compute_s=0.032, plan=1)
    await shown_step(head, job, 8)
    for _ in range(2):
        plan = (await adjust(head, job, 0.995)).plan
        assert (plan.id, plan.from_step, plan.strategy_params) == (2, 8, '{"sparsity":0.995}')
        assert (list(plan.shares), plan.reason) == ([1.0, 1.0], "sparsity 0.98 → 0.995 (asked by unauthenticated)")
    for agent in (a, b):
        await agent.until(lambda agent=agent: bool(agent.plans))  # type: ignore[misc]
        assert [told.plan.strategy_params for told in agent.plans] == ['{"sparsity":0.995}']
    assert "plan 2: sparsity 0.98 → 0.995 (asked by unauthenticated)" in await head.events(job)

    for _ in range(2):
        await a.train((job, 1, 0), range(9, 40), local=32, total=64, compute_s=0.032, plan=2)
        await b.train((job, 1, 1), range(9, 40), local=32, total=64, compute_s=0.096, plan=2)
    await a.until(lambda: len(a.plans) == 2)
    assert (a.plans[1].plan.id, a.plans[1].plan.planner, a.plans[1].plan.strategy_params) == (
        3,
        "inverse-time",
        '{"sparsity":0.995}',
    )

    await a.end((job, 1, 0), common_pb2.EXIT_KIND_SIGNALLED, -9, "killed by signal 9", step=40)
    second = await head.phase(job, pb.PHASE_RUNNING, run=2)
    assert (second.plan.id, second.plan.strategy_params) == (1, '{"sparsity":0.995}')
    assert json.loads(second.spec.strategy_settings)["sparsity"] == 0.98
    old, new = (next(x for x in a.launches if x.id.run == run) for run in (1, 2))
    assert new.plan.strategy_params == '{"sparsity":0.995}'
    assert new.keys.secret != old.keys.secret
    await asyncio.gather(a.disconnect(), b.disconnect())


async def test_pins_hold_until_they_are_taken_off_and_plans_can_be_derived_again(head: Controller) -> None:
    """1. A dense job's batch and shares are pinned: one plan, and no faster device moves them. 2. What does not fit is
    refused. 3. Unpinned, the next plan follows the speeds. 4. Every plan's input gives its output."""
    a, b = await two_agents(head)
    job = await head.submit((2, 2))
    await head.phase(job, pb.PHASE_RUNNING)
    seen = await head.stub.Adjust(pb.AdjustRequest(job=job, total_batch=96, shares=[2.0, 1.0]), timeout=CALL_S)
    assert (seen.plan.total_batch, list(seen.plan.shares)) == (96, [2.0, 1.0])
    assert (seen.pins.total_batch, list(seen.pins.shares)) == (96, [2.0, 1.0])
    assert "batch of the script → 96, shares 67/33 % (asked by unauthenticated)" in seen.plan.reason
    for request, text in (
        (pb.AdjustRequest(job=job, shares=[1.0]), "shares: 1 values do not fit a run of 2 workers"),
        (pb.AdjustRequest(job=job, shares=[1.0, 0.0]), "shares: 0.0 of rank 1 must be above 0"),
        (pb.AdjustRequest(job=job, total_batch=1), "total_batch = 1 must be 2"),
        (pb.AdjustRequest(job=job, unpin=["speed"]), "unpin = 'speed' is not known. Use shares, strategy, total-batch"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await head.stub.Adjust(request, timeout=CALL_S)
        assert (refused.value.code(), text in (refused.value.details() or "")) == (
            grpc.StatusCode.INVALID_ARGUMENT, True,
        ), refused.value.details()  # fmt: skip

    await a.train((job, 1, 0), range(40), local=64, total=96, compute_s=0.064, plan=2)
    await b.train((job, 1, 1), range(40), local=32, total=96, compute_s=0.128, plan=2)
    await shown_step(head, job, 40)
    unpinned = await head.stub.Adjust(pb.AdjustRequest(job=job, unpin=["shares", "total-batch"]), timeout=CALL_S)
    assert (unpinned.pins.total_batch, list(unpinned.pins.shares)) == (0, [])
    assert (unpinned.plan.id, unpinned.plan.total_batch) == (3, 0)
    for agent, rank, compute_s in ((a, 0, 0.064), (b, 1, 0.128)):
        await agent.train((job, 1, rank), range(41, 81), local=64 - 32 * rank, total=96, compute_s=compute_s, plan=3)
    await a.until(lambda: len(a.plans) == 3)
    assert a.plans[2].plan.planner == "inverse-time"
    assert "shares, total-batch: decided by the controller again (requested by unauthenticated)" in await head.events(
        job
    )

    reply = await head.stub.Plans(pb.PlansRequest(job=job), timeout=CALL_S)
    assert PLANNERS["placement"].run_json(reply.placement.input) == reply.placement.output
    assert [d.plan.id for d in reply.plans] == [1, 2, 3, 4]
    for d in reply.plans:
        assert PLANNERS[d.plan.planner].run_json(d.input) == d.output
    assert list((await head.stub.Plans(pb.PlansRequest(job=job, run=7), timeout=CALL_S)).plans) == []
    await asyncio.gather(a.disconnect(), b.disconnect())


async def test_what_cannot_be_adjusted_says_why(head: Controller) -> None:
    job = await head.submit((1, 1), **SPARSE)
    assert await refusal(head, job, 0.99) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f"job {job} is queued, and only a running job can be adjusted. Try again when it runs",
    )
    assert await refusal(head, "nothing", 0.99) == (
        grpc.StatusCode.NOT_FOUND,
        "no job 'nothing'. `atoll jobs --all` lists them",
    )
    for sparsity, text in (
        (None, "the request changes nothing. Give a strategy, one of its settings"),
        (1.0, "strategy_params.sparsity = 1.0 should be less than or equal to 0.9999"),
    ):
        code, said = await refusal(head, job, sparsity)
        assert (code, text in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, said = await refusal(head, job, float("nan"))
    assert (code, "sparsity = nan should be" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_links_are_shown_and_more_than_the_protocol_allows_is_refused(head: Controller) -> None:
    a, b = await two_agents(head)
    job = await head.submit((2, 2), **SPARSE)
    await head.phase(job, pb.PHASE_RUNNING)
    link = common_pb2.LinkSample(peer=1, sent_bytes=9, received_bytes=8, busy_s=0.5, goodput_bps=96e6)
    await a.send(telemetry(job, [link]))
    async with asyncio.timeout(30):
        while not (seen := await head.get(job)).workers[0].links:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert list(seen.workers[0].links) == [link]
    for links, text in (
        ([link] * 65, "links has 65 entries, at most 64"),
        ([common_pb2.LinkSample(peer=5000)], "links.peer = 5000"),
        ([common_pb2.LinkSample(goodput_bps=float("nan"))], "goodput_bps = nan"),
        ([common_pb2.LinkSample(dropped={f"r{n}": 1 for n in range(17)})], "dropped has 17 entries"),
        ([common_pb2.LinkSample(dropped={"x" * 5000: 1})], "dropped has 5000 characters"),
    ):
        await b.disconnect()
        await b.connect(head.address)
        await b.send(telemetry(job, links, rank=1))
        await b.until(lambda: b.failure is not None)
        assert b.failure is not None
        assert b.failure.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert text in (b.failure.details() or "")
    await asyncio.gather(a.disconnect(), b.disconnect())


async def test_keys_are_in_no_log_event_or_answer(etcd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job's life, with another sparsity, a failure and a controller that takes over, at the most talkative level."""
    caplog.set_level("DEBUG")
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        a, b = await two_agents(head)
        job = await head.submit((2, 2), **SPARSE)
        await head.phase(job, pb.PHASE_RUNNING)
        answers = [await adjust(head, job, 0.9)]
        await asyncio.gather(a.disconnect(), b.disconnect())
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        await asyncio.gather(a.connect(head.address), b.connect(head.address))
        await a.end((job, 1, 0), common_pb2.EXIT_KIND_FAILED, 3, "ValueError: no", step=1)
        answers.append(await head.phase(job, pb.PHASE_FAILED))
        events = await head.events(job) + await head.events()
        await asyncio.gather(a.disconnect(), b.disconnect())
    run = await run_record(etcd, job, 1)
    assert repr(run).count("data_seed") == 0
    said = "\n".join([caplog.text, *events, *(json.dumps(to_plain(answer)) for answer in answers)])
    raw = said.encode() + b"".join(answer.SerializeToString() for answer in answers)
    for secret in [bytes.fromhex(run.data_seed), *(private_key(run.data_seed, job, 1, rank) for rank in (0, 1))]:
        for form in (secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()):
            assert form not in raw


async def run_record(etcd: str, job: str, run: int) -> RunRecord:
    store = EtcdStore([etcd], None)
    entry = await store.read(keys.run(job, run))
    await store.close()
    assert entry is not None
    return decode(RunRecord, entry.key, entry.value)


async def shown_step(head: Controller, job: str, step: int) -> None:
    async with asyncio.timeout(30):
        while (await head.get(job)).progress.step != step:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def telemetry(job: str, links: list[common_pb2.LinkSample], rank: int = 0) -> agents_pb2.AgentMessage:
    worker = agents_pb2.WorkerTelemetry(id=common_pb2.WorkerId(job=job, run=1, rank=rank), links=links)
    return agents_pb2.AgentMessage(telemetry=agents_pb2.Telemetry(workers=[worker]))
