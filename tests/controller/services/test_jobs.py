"""JobService over real gRPC: what is refused, with which code, and what streams carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from daemons import CALL_S, Controller, bundle, controller, leading, spec_for
from fake_agent import FakeAgent

from atoll.controller.services.jobs import address_of
from atoll.errors import BadInput
from atoll.network.rpc import MAX_CODE_BYTES, open_channel
from atoll.v1 import common_pb2
from atoll.v1 import jobs_pb2 as pb

CODE = bundle({"train.py": b"print('hello')\n"})


@pytest.fixture
async def head(etcd: str, tmp_path: Path) -> AsyncIterator[Controller]:
    async with controller(tmp_path, etcd) as one:
        yield await leading(one)


async def refusal(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return refused.value.code(), refused.value.details() or ""


async def test_bad_submits_are_refused_by_field_and_leave_nothing(head: Controller) -> None:
    other = bundle({"other.py": b""})
    for spec, code, message in (
        (spec_for(CODE, min_workers=3, max_workers=2), [CODE], "spec.max_workers = 2 must be at least min_workers = 3"),
        (spec_for(CODE, name="Bad Name"), [CODE], "spec.name = 'Bad Name'"),
        (spec_for(other), [other], "spec.script = 'train.py' is not in the code bundle, which has other.py"),
        (spec_for(CODE), [other], "SHA-256"),
        (spec_for(CODE), [], "SHA-256"),
        (spec_for(CODE), [bytes(2**20 + 1)], "a code message has 1048577 bytes"),
        (spec_for(CODE), [bytes(2**20)] * (MAX_CODE_BYTES // 2**20 + 1), "more than 8388608 bytes"),
    ):
        got, text = await refusal(head.submit_raw(spec, code, "request"))
        assert (got, message in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
    assert (await head.stub.List(pb.ListRequest(all=True), timeout=CALL_S)).jobs == []


async def test_submit_wants_a_header_and_a_sane_request_id(head: Controller) -> None:
    async def code_first() -> AsyncIterator[pb.SubmitRequest]:
        yield pb.SubmitRequest(code=CODE)

    assert await refusal(head.stub.Submit(code_first(), timeout=CALL_S)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the first message of Submit must be the header. Send the spec before the code",
    )
    code, text = await refusal(head.submit_raw(spec_for(CODE), [CODE], "../../x"))
    assert (code, "header.request_id = '../../x'" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_malformed_and_oversize_messages_have_clear_codes(head: Controller) -> None:
    async with open_channel(head.address, None) as channel:
        raw = channel.unary_unary("/atoll.v1.JobService/Get")
        code, text = await refusal(raw(b"\xff\xff\xff\xff", timeout=CALL_S))
        assert (code, "cannot be parsed" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        stream = channel.stream_unary("/atoll.v1.JobService/Submit")
        code, text = await refusal(stream(iter([b"\x0a\xff\xff\xff\xff\xff"]), timeout=CALL_S))
        assert (code, "cannot be parsed" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    async with grpc.aio.insecure_channel(head.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        code, text = await refusal(channel.unary_unary("/atoll.v1.JobService/Get")(bytes(6 * 2**20), timeout=CALL_S))
        assert (code, "larger than max" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        code, _ = await refusal(channel.unary_unary("/atoll.v1.JobService/Nothing")(b"", timeout=CALL_S))
        assert code == grpc.StatusCode.UNIMPLEMENTED
    assert (await head.stub.List(pb.ListRequest(), timeout=CALL_S)).jobs == []


async def test_jobs_are_found_by_id_and_by_the_newest_of_a_name(head: Controller) -> None:
    first, second = await head.submit(), await head.submit()
    assert (await head.get("tiny")).id == second
    assert (await head.get(first)).id == first
    code, text = await refusal(head.get("nothing"))
    assert (code, text) == (grpc.StatusCode.NOT_FOUND, "no job 'nothing'. `atoll jobs --all` lists them")


async def test_a_job_that_is_done_cannot_be_cancelled(head: Controller) -> None:
    a = await FakeAgent("a").connect(head.address)
    job = await head.submit()
    await a.running(job, 1)
    await a.end((job, 1, 0))
    await head.phase(job, pb.PHASE_DONE)
    code, text = await refusal(head.stub.Cancel(pb.CancelRequest(job=job), timeout=CALL_S))
    assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, f"job {job} is done already: its worker finished")
    await a.disconnect()
    assert (await head.stub.List(pb.ListRequest(), timeout=CALL_S)).jobs == []
    assert [j.id for j in (await head.stub.List(pb.ListRequest(all=True), timeout=CALL_S)).jobs] == [job]


async def test_a_job_shows_workers_progress_and_plan(head: Controller) -> None:
    a = await FakeAgent("a").connect(head.address)
    job = await head.submit()
    await a.running(job, 1)
    await a.train((job, 1, 0), range(19), local=64, total=64, compute_s=0.05, plan=1)
    async for state in head.stub.Watch(pb.WatchRequest(job=job), timeout=CALL_S):
        if state.progress.step == 19 and state.workers[0].status.step == 19:
            break
    assert state.progress.samples_per_s == pytest.approx(640)
    assert (state.workers[0].node, state.workers[0].share, state.workers[0].last.local_batch) == ("a", 1.0, 64)
    assert list(state.plan.shares) == [1.0]
    await a.disconnect()


async def test_events_are_followed_until_the_job_has_ended(head: Controller) -> None:
    a = await FakeAgent("a").connect(head.address)
    job = await head.submit()

    async def follow() -> list[pb.Job]:
        stream = head.stub.Events(pb.EventsRequest(job=job, follow=True), timeout=CALL_S)
        return [event async for event in stream]

    following = asyncio.create_task(follow())
    await a.running(job, 1)
    await a.end((job, 1, 0), kind=common_pb2.EXIT_KIND_FAILED, code=3, reason="ValueError: no")
    events = await following
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))  # type: ignore[attr-defined]
    assert events[-1].text == "failed: rank 0 on a failed: ValueError: no"  # type: ignore[attr-defined]
    ended = await head.get(job)
    assert (ended.exit_code, ended.workers[0].status.reason) == (3, "ValueError: no")
    await a.disconnect()


async def test_logs_are_followed_tailed_and_chosen_by_rank(head: Controller) -> None:
    a = await FakeAgent("a", devices=2).connect(head.address)
    job = await head.submit((2, 2))
    await a.running(job, 1, 1)
    await a.log((job, 1, 0), 0, b"zero\nhalf a li")
    await a.log((job, 1, 1), 0, b"one\ntwo\nthree\n")

    async def read(**wanted: object) -> list[tuple[int, int, int, bytes]]:
        stream = head.stub.Logs(pb.LogsRequest(job=job, **wanted), timeout=CALL_S)
        return [(chunk.run, chunk.rank, chunk.offset, chunk.data) async for chunk in stream]

    assert await read(rank=1, tail_lines=2) == [(1, 1, 4, b"two\nthree\n")]
    assert await read(rank=0) == [(1, 0, 0, b"zero\nhalf a li")]
    code, _ = await refusal(read(rank=2))
    assert code == grpc.StatusCode.NOT_FOUND
    code, _ = await refusal(head.stub.Logs(pb.LogsRequest(job="nothing", follow=True), timeout=CALL_S).read())
    assert code == grpc.StatusCode.NOT_FOUND
    following = asyncio.create_task(read(rank=0, follow=True))
    await a.log((job, 1, 0), 14, b"ne\nlast words")
    await a.end((job, 1, 0))
    await a.end((job, 1, 1))
    followed = await following
    assert b"".join(data for _, _, _, data in followed) == b"zero\nhalf a line\nlast words"
    await a.disconnect()


async def test_nodes_are_listed_connected_and_gone(head: Controller) -> None:
    a = await FakeAgent("a", devices=2).connect(head.address)
    b = await FakeAgent("b").connect(head.address)
    await b.disconnect()
    async with asyncio.timeout(30):
        while len([n for n in (await nodes(head)).nodes if n.connected]) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    reply = await nodes(head)
    assert [(n.name, n.connected, len(n.devices), n.island) for n in reply.nodes] == [
        ("a", True, 2, "here"),
        ("b", False, 1, "here"),
    ]
    assert reply.controller == head.address
    await a.disconnect()


async def test_whoever_asks_is_dialled_at_its_own_address_and_at_no_low_port(head: Controller) -> None:
    came = asyncio.Event()

    async def arrived(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.close()

    async with await asyncio.start_server(arrived, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        answer = await head.stub.DialBack(pb.DialBackRequest(port=port), timeout=CALL_S)
        assert answer.address == "127.0.0.1"
        async with asyncio.timeout(CALL_S):
            await came.wait()
    nobody = await head.stub.DialBack(pb.DialBackRequest(port=port), timeout=CALL_S)
    assert nobody.address == "127.0.0.1"  # nor is it told that nobody listens
    for refused in (0, 443, 70_000):
        code, text = await refusal(head.stub.DialBack(pb.DialBackRequest(port=refused), timeout=CALL_S))
        assert (code, "must be 1024 to 65535" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:41234", "10.0.0.7"),
        ("ipv6:%5Bfd00::2%5D:41234", "fd00::2"),
        ("ipv6:[::ffff:10.0.0.7]:41234", "10.0.0.7"),
    ],
)
def test_the_address_of_a_caller(peer: str, address: str) -> None:
    assert address_of(peer) == address
    with pytest.raises(BadInput, match="no address"):
        address_of("unix:/run/atoll")


async def nodes(head: Controller) -> pb.ListNodesReply:
    return await head.stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_S)  # type: ignore[no-any-return]
