"""The client against scripted controllers over real gRPC: who leads, what is retried, what streams promise."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from held_ports import free_port
from scripted_controller import ScriptedController

import atoll
from atoll import to_plain
from atoll.client.client import AsyncClient, Client
from atoll.client.leader_connection import Leader, waiting
from atoll.errors import AtollError, BadInput, Conflict, ControllerUnreachable, DeadlineExceeded, NotAllowed, NotFound
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb


async def next_of(stream: AsyncIterator[Any]) -> Any:
    async with asyncio.timeout(30):
        return await anext(stream)


async def test_submit_sends_spec_and_code_whole(controller: ScriptedController) -> None:
    code = bytes(range(256)) * 10_000  # three messages
    async with AsyncClient([controller.address]) as client:
        job = await client.submit(common.JobSpec(name="vit", script="t.py", min_workers=1, max_workers=2), code)
    header = controller.script.headers[0]
    assert job == "vit-0000"
    assert controller.script.code == code
    assert header.spec.code_sha256 == hashlib.sha256(code).hexdigest()
    assert len(header.request_id) == 32


async def test_a_submit_whose_answer_was_lost_makes_one_job(controller: ScriptedController) -> None:
    """1. The job is in etcd. 2. The controller dies before it answers. 3. The client asks again: same job."""
    controller.script.lose_submit_replies = 2
    async with AsyncClient([controller.address]) as client:
        job = await client.submit(common.JobSpec(name="vit"), b"code")
    assert len(controller.script.headers) == 3
    assert list(controller.script.submitted.values()) == [job]


async def test_code_beyond_the_limit_is_refused_before_any_connection() -> None:
    async with AsyncClient([f"127.0.0.1:{free_port()}"]) as client:
        with pytest.raises(BadInput, match="exceeds"):
            await client.submit(common.JobSpec(name="vit"), bytes(9 * 2**20))


async def test_the_leader_hint_of_a_standby_is_followed_at_once(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    with ScriptedController() as standby:
        standby.script.leader = controller.address
        async with AsyncClient([standby.address]) as client:
            assert (await client.get("vit-1")).id == "vit-1"
            await client.get("vit-1")  # it is remembered
        assert standby.script.calls == ["Get"]


async def test_two_standbys_that_name_each_other_do_not_spin(controller: ScriptedController) -> None:
    with ScriptedController() as other:
        controller.script.leader, other.script.leader = other.address, controller.address
        async with AsyncClient([controller.address, other.address], timeout_s=1.0) as client:
            with pytest.raises(ControllerUnreachable, match="not the leader"):
                await client.jobs()
        assert len(controller.script.calls) + len(other.script.calls) < 20


async def test_a_dead_controller_is_passed_over_for_the_next(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    async with AsyncClient([f"127.0.0.1:{free_port()}", controller.address]) as client:
        assert [job.id for job in await client.jobs()] == ["vit-1"]


async def test_a_controller_that_hangs_is_passed_over_for_the_next(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    with ScriptedController() as paused:
        paused.script.silent = True
        async with AsyncClient(
            [paused.address, controller.address], timeout_s=6.0
        ) as client:  # half of it for one that hangs
            assert (await client.get("vit-1")).id == "vit-1"


async def test_silence_is_told_of_once_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was said for all of the timeout, 10 s where nobody chose another."""
    caplog.set_level(logging.WARNING, waiting.name)  # a command whose output nobody sees says nothing of it
    port = free_port()
    async with AsyncClient([f"127.0.0.1:{port}"], timeout_s=4.0) as client:
        with pytest.raises(ControllerUnreachable):
            await client.get("vit")
    assert caplog.messages == [f"no leading controller at 127.0.0.1:{port}: Connection refused. Trying for 4 s"]


async def test_nobody_there_is_said_within_the_timeout() -> None:
    port = free_port()
    async with AsyncClient([f"127.0.0.1:{port}"], timeout_s=0.5) as client:
        started = time.monotonic()
        with pytest.raises(ControllerUnreachable) as caught:
            await client.get("vit")
    assert time.monotonic() - started > 0.4
    assert f"127.0.0.1:{port} within 0.5 s: Connection refused" in str(caught.value)
    assert "atoll up" in str(caught.value)


async def test_a_last_try_that_time_was_too_short_for_hides_no_cause() -> None:
    code, nothing = grpc.StatusCode, grpc.aio.Metadata()
    late = grpc.aio.AioRpcError(code.DEADLINE_EXCEEDED, nothing, nothing, details="Deadline Exceeded")
    refused = grpc.aio.AioRpcError(code.UNAVAILABLE, nothing, nothing, details="connect: Connection refused (111)")
    for timeout_s, before, cause in ((1.2, refused, "Connection refused"), (0.5, late, "it does not answer")):

        async def attempt(_: object, deadline_s: float, before: Exception = before) -> None:
            if deadline_s > 0.2:
                raise before
            await asyncio.sleep(deadline_s)
            raise late

        with pytest.raises(ControllerUnreachable, match=cause):
            await Leader(["127.0.0.1:1"], None, timeout_s).call("asking", attempt)


async def test_a_controller_that_never_answers_counts_as_unreachable(controller: ScriptedController) -> None:
    controller.script.silent = True
    async with AsyncClient([controller.address], timeout_s=0.5) as client:
        with pytest.raises(ControllerUnreachable, match="does not answer"):
            await client.jobs()


async def test_a_restarting_controller_is_waited_for(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    controller.kill()
    async with AsyncClient([controller.address], timeout_s=60.0) as client:
        asking = asyncio.create_task(client.get("vit-1"))
        await asyncio.sleep(0.3)
        assert not asking.done()
        await asyncio.to_thread(controller.start)
        assert (await asking).id == "vit-1"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, BadInput),
        (grpc.StatusCode.FAILED_PRECONDITION, Conflict),
        (grpc.StatusCode.PERMISSION_DENIED, NotAllowed),
        (grpc.StatusCode.UNAUTHENTICATED, NotAllowed),
        (grpc.StatusCode.INTERNAL, AtollError),
    ],
)
async def test_a_refusal_is_final(
    controller: ScriptedController, code: grpc.StatusCode, error: type[AtollError]
) -> None:
    controller.script.refuse = code
    async with AsyncClient([controller.address]) as client:
        with pytest.raises(error, match="as the test asked"):
            await client.jobs()
    assert controller.script.calls == ["List"]


async def test_watch_ends_with_the_job(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    async with AsyncClient([controller.address]) as client:
        watching = client.watch("vit-1")
        assert (await next_of(watching)).phase == pb.PHASE_RUNNING
        controller.script.change("vit-1", phase=pb.PHASE_DONE)
        assert (await next_of(watching)).phase == pb.PHASE_DONE
        with pytest.raises(StopAsyncIteration):
            await next_of(watching)


async def test_watch_goes_on_over_a_restart_and_says_nothing_twice(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    async with AsyncClient([controller.address]) as client:
        watching = client.watch("vit-1")
        await next_of(watching)
        controller.script.change("vit-1", restarts=1)
        assert (await next_of(watching)).restarts == 1
        await asyncio.to_thread(controller.kill)
        await asyncio.to_thread(controller.start)
        coming = asyncio.create_task(next_of(watching))
        await asyncio.to_thread(controller.wait_for, lambda script: script.calls.count("Watch") == 2)
        assert not coming.done()
        controller.script.change("vit-1", phase=pb.PHASE_DONE)
        assert (await coming).phase == pb.PHASE_DONE
        await watching.aclose()


async def test_watch_gives_up_when_the_controller_stays_away(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    async with AsyncClient([controller.address], timeout_s=0.5) as client:
        watching = client.watch("vit-1")
        await next_of(watching)
        await asyncio.to_thread(controller.kill)
        with pytest.raises(ControllerUnreachable):
            await next_of(watching)


async def test_events_come_once_and_in_order_over_a_restart(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    for number in range(3):
        controller.script.happened("vit-1", "PLAN_ISSUED", f"plan {number}")
    async with AsyncClient([controller.address]) as client:
        events = client.events("vit-1", follow=True)
        seen = [(await next_of(events)).text for _ in range(3)]
        await asyncio.to_thread(controller.kill)
        controller.script.happened("vit-1", "PLAN_ISSUED", "plan 3")
        await asyncio.to_thread(controller.start)
        seen.append((await next_of(events)).text)
        controller.script.happened("vit-1", "PLAN_ISSUED", "plan 4")
        controller.script.change("vit-1", phase=pb.PHASE_DONE)
        seen += [event.text async for event in events]
    assert seen == [f"plan {number}" for number in range(5)]


async def test_events_of_the_cluster_end_without_follow(controller: ScriptedController) -> None:
    controller.script.happened("", "NODE", "local-0 joined")
    async with AsyncClient([controller.address]) as client:
        assert [event.text async for event in client.events()] == ["local-0 joined"]


async def test_logs_lose_and_repeat_no_byte_over_restarts(controller: ScriptedController) -> None:
    """1. Half a line of each of two ranks arrives. 2. The controller is killed; more is written. 3. It comes back."""
    controller.script.add("vit-1")
    controller.script.write(b"zero: one\nzero: tw", rank=0)
    controller.script.write(b"one: one\n", rank=1)
    got: dict[int, bytes] = {0: b"", 1: b""}
    async with AsyncClient([controller.address]) as client:
        logs = client.logs("vit-1", follow=True)
        for _ in range(2):
            chunk = await next_of(logs)
            got[chunk.rank] += chunk.data
        await asyncio.to_thread(controller.kill)
        controller.script.write(b"o\n", rank=0)
        controller.script.write(b"one: two\n", rank=1)
        await asyncio.to_thread(controller.start)
        for _ in range(2):
            chunk = await next_of(logs)
            got[chunk.rank] += chunk.data
        controller.script.write(b"last\n", run=2, rank=0)
        controller.script.change("vit-1", phase=pb.PHASE_DONE)
        async for chunk in logs:
            got[chunk.rank] += chunk.data
    assert got == {0: b"zero: one\nzero: two\nlast\n", 1: b"one: one\none: two\n"}


async def test_a_log_tail_stays_a_tail_over_a_restart(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    controller.script.write(b"of an older run\n", run=1)
    controller.script.write(b"old\nnew\n", run=2)
    async with AsyncClient([controller.address]) as client:
        logs = client.logs("vit-1", rank=0, follow=True, tail_lines=1)
        assert (await next_of(logs)).data == b"of an older run\n"
        assert (await next_of(logs)).data == b"new\n"
        await asyncio.to_thread(controller.kill)
        controller.script.write(b"newer\n", run=2)
        await asyncio.to_thread(controller.start)
        assert (await next_of(logs)).data == b"newer\n"
        await logs.aclose()


async def test_logs_of_no_job_do_not_wait(controller: ScriptedController) -> None:
    async with AsyncClient([controller.address]) as client:
        with pytest.raises(NotFound, match="no job 'nope'"):
            await next_of(client.logs("nope", follow=True))


def test_the_client_without_an_event_loop_offers_all_that_the_other_does() -> None:
    public = {name for name in vars(AsyncClient) if not name.startswith("_")}
    assert {name for name in vars(Client) if not name.startswith("_")} == public


def test_a_sparsity_is_adjusted_and_a_job_without_one_says_so(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    with Client([controller.address]) as client:
        with pytest.raises(Conflict, match="adjust vit-1: job vit-1 has no sparsity"):
            client.adjust("vit-1", params={"sparsity": 0.995})
        controller.script.jobs["vit-1"].spec.strategy = "stale-sparse"
        assert client.adjust("vit-1", params={"sparsity": 0.995}).plan.strategy_params == '{"sparsity":0.995}'


def test_the_client_without_an_event_loop_does_the_same(controller: ScriptedController) -> None:
    with Client([controller.address]) as client:
        job = client.submit(common.JobSpec(name="vit"), b"code")
        controller.script.write(b"hello\n")
        controller.script.happened(job, "RUNNING", "started")
        assert [found.id for found in client.jobs()] == [job]
        assert client.cancel(job).phase == pb.PHASE_STOPPING
        with pytest.raises(DeadlineExceeded, match=r"did not end within 0\.2 s"):
            client.wait(job, timeout_s=0.2)
        controller.script.change(job, phase=pb.PHASE_CANCELLED)
        assert client.wait(job, timeout_s=60).phase == pb.PHASE_CANCELLED
        assert client.get(job).reason == "cancelled by its user"
        assert [chunk.data for chunk in client.logs(job)] == [b"hello\n"]
        assert [event.text for event in client.events(job)] == ["started"]
        assert [seen.phase for seen in client.watch(job)] == [pb.PHASE_CANCELLED]
        assert not client.nodes().nodes


async def test_the_client_works_inside_a_running_event_loop_as_in_a_notebook(controller: ScriptedController) -> None:
    """Twice in a row, and what it started is gone with it."""
    controller.script.add("vit-1")
    for _ in range(2):
        with Client([controller.address]) as client:
            assert [found.id for found in client.jobs()] == ["vit-1"]
            assert [seen["phase"] for seen in map(to_plain, client.jobs())] == ["running"]
    assert not [thread for thread in threading.enumerate() if thread.name == "atoll-client"]


def test_a_script_is_submitted_from_python_as_from_a_shell(
    controller: ScriptedController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Fields are those of a job file. 2. Whom to ask may be in the environment. 3. A field that is none, a secret
    that is not set and a script that is not there are told before anything is sent."""
    script = tmp_path / "train.py"
    script.write_text("print('hello')")
    job = atoll.submit(script, workers="2:3", args=["--lr", "0.1"], controllers=[controller.address])
    spec = controller.script.headers[0].spec
    assert job == "train-0000"
    assert (spec.script, spec.min_workers, spec.max_workers, list(spec.args)) == ("train.py", 2, 3, ["--lr", "0.1"])
    monkeypatch.setenv("ATOLL_CONTROLLER", controller.address)
    atoll.submit(str(script), checkpoint={"every_steps": 7})
    assert controller.script.headers[1].spec.checkpoint.every_steps == 7
    with Client() as client:
        assert [one.id for one in client.jobs()] == ["train-0000", "train-0001"]
    monkeypatch.setenv("ATOLL_TLS_DIR", str(tmp_path / "none"))
    with pytest.raises(BadInput, match="ATOLL_TLS_DIR .* is no folder"):
        Client()
    monkeypatch.delenv("ATOLL_TLS_DIR")
    for wrong, says in (({"worker": 2}, "worker"), ({"secrets": ["NOT_SET_HERE"]}, "NOT_SET_HERE is not set")):
        with pytest.raises(BadInput, match=says):
            atoll.submit(script, **wrong)
    with pytest.raises(AtollError, match="nothing.py"):
        atoll.submit(tmp_path / "nothing.py")
    assert len(controller.script.headers) == 2


@pytest.mark.parametrize("address", ["", "host:", "host:70000", "host:abc", ":7700"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match="HOST:PORT"):
        AsyncClient([address])


def test_a_timeout_that_is_no_time_is_refused() -> None:
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(BadInput, match="must be positive"):
            AsyncClient(timeout_s=timeout_s)
