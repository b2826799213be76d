"""The whole controller over a real etcd, with scripted agents over real gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from daemons import CALL_S, Controller, controller, leading, told_address
from etcd_server import EtcdServer
from fake_agent import FakeAgent
from grpc_health.v1 import health_pb2, health_pb2_grpc
from held_ports import free_port

from atoll.controller.daemon import serve
from atoll.controller.jobs.lifecycle.reconcile import PLAIN_GRACE_S
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.settings import ControllerSettings
from atoll.controller.state import keys
from atoll.controller.state.election import Election
from atoll.controller.state.etcd import EtcdStore
from atoll.errors import SettingError
from atoll.network.rpc import leader_hint, open_channel
from atoll.v1 import common_pb2
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.jobs_pb2_grpc import JobServiceStub


async def test_a_job_is_submitted_launched_run_and_done(etcd: str, tmp_path: Path) -> None:
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        a = await FakeAgent("a").connect(head.address)
        b = await FakeAgent("b").connect(head.address)
        job = await head.submit((2, 2), args=["--fast"])
        running = await head.phase(job, pb.PHASE_RUNNING)
        assert [(w.rank, w.node) for w in running.workers] == [(0, "a"), (1, "b")]
        assert running.run == 1
        launch = b.launches[0]
        assert (launch.world_size, launch.id.rank, launch.node_rank, launch.master_port) == (2, 1, 1, 29500)
        assert list(launch.spec.args) == ["--fast"]
        assert list(launch.plan.shares) == [1.0, 1.0]
        await a.end((job, 1, 0), step=7)
        await b.end((job, 1, 1), step=7)
        done = await head.phase(job, pb.PHASE_DONE)
        assert done.reason == "all 2 ranks finished"
        await a.until(lambda: a.forgotten == [(job, 1, 0)])
        await asyncio.gather(a.disconnect(), b.disconnect())
        texts = await head.events(job)
        assert texts[0].startswith("submitted (unauthenticated): train.py")
        assert texts[-1] == "done: all 2 ranks finished"


async def test_restarted_controller_adopts_running_workers(etcd: str, tmp_path: Path) -> None:
    """1. A job of two workers runs. 2. The controller is cut off without a word. 3. A new one on the same etcd takes
    over. 4. The agents come back with their workers: none is launched again or stopped, and the job ends well."""
    async with controller(tmp_path / "first", etcd) as head:
        await leading(head)
        a = await FakeAgent("a").connect(head.address)
        b = await FakeAgent("b").connect(head.address)
        job = await head.submit((2, 2))
        await head.phase(job, pb.PHASE_RUNNING)
        head.task.cancel()
        await asyncio.wait({head.task})
    await asyncio.gather(a.disconnect(), b.disconnect())
    async with controller(tmp_path / "second", etcd) as head:
        await leading(head)
        await a.connect(head.address)
        await asyncio.sleep(3)  # longer than the node lease: b has the grace that a new leader gives
        assert (await head.get(job)).phase == pb.PHASE_RUNNING
        await b.connect(head.address)
        assert (await head.get(job)).run == 1
        await a.end((job, 1, 0))
        await b.end((job, 1, 1))
        await head.phase(job, pb.PHASE_DONE)
        assert (len(a.launched), len(b.launched)) == (1, 1)
        assert (a.stopped, b.stopped) == ([], [])
        await asyncio.gather(a.disconnect(), b.disconnect())


async def test_workers_of_a_removed_job_are_stopped_when_their_agent_comes(etcd: str, tmp_path: Path) -> None:
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        a = FakeAgent("a")
        stray = common_pb2.WorkerId(job="gone-1234", run=3, rank=0)
        a.workers["gone-1234", 3, 0] = common_pb2.WorkerStatus(id=stray, state=common_pb2.WORKER_STATE_RUNNING)
        await a.connect(head.address)
        await a.until(lambda: a.forgotten == [("gone-1234", 3, 0)])
        assert a.stopped[0].reason == "the controller knows no such job"
        await a.disconnect()


async def test_a_lost_node_is_fenced_and_the_job_goes_on_and_grows_again(etcd: str, tmp_path: Path) -> None:
    """1. Two workers run. 2. Agent b vanishes with its worker. 3. Run 1 is stopped, run 2 has one worker.
    4. b comes back empty. 5. The job grows to two in run 3."""
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        a = await FakeAgent("a").connect(head.address)
        b = await FakeAgent("b").connect(head.address)
        job = await head.submit((1, 2))
        await head.phase(job, pb.PHASE_RUNNING)
        await b.disconnect()
        await a.until(lambda: bool(a.stopped))
        assert a.stopped[0].run == 1
        second = await head.phase(job, pb.PHASE_RUNNING, run=2)
        assert [w.node for w in second.workers] == ["a"]
        assert second.restarts == 0
        a.workers[job, 2, 0].uses_atoll = True
        await a.beat()
        b.workers.clear()
        await b.connect(head.address)
        third = await head.phase(job, pb.PHASE_RUNNING, run=3)
        assert [w.node for w in third.workers] == ["a", "b"]
        await a.end((job, 3, 0))
        await b.end((job, 3, 1))
        await head.phase(job, pb.PHASE_DONE)
        await asyncio.gather(a.disconnect(), b.disconnect())
        assert any("growing from 1 to 2 workers" in text for text in await head.events(job))
        assert any("node b was lost" in text for text in await head.events())


async def test_copies_go_to_other_racks_and_islands_and_move_little_when_a_machine_is_replaced(
    etcd: str, tmp_path: Path
) -> None:
    """1. Four machines of one island in two racks: each keeps its copies in the other rack. 2. One is lost, another
    joins: copies of its own and of its partner move. 3. With four machines in another island and site_safe, all copies
    are in the other island. 4. Workers are told what was recorded."""
    async with controller(tmp_path, etcd) as head:
        await leading(head)

        async def joined(name: str, island: str, rack: str) -> FakeAgent:
            agent = FakeAgent(name)
            agent.register.island, agent.register.rack = island, rack
            return await agent.connect(head.address)

        async def kept(job: str, run: int) -> dict[str, list[str]]:
            """By machine, where copies of its state are, as the run's placement says."""
            await head.phase(job, pb.PHASE_RUNNING, run=run)
            placement = (await head.stub.Plans(pb.PlansRequest(job=job, run=run), timeout=CALL_S)).placement
            assert PLANNERS["placement"].run_json(placement.input) == placement.output
            names = [machine["name"] for machine in json.loads(placement.input)["machines"]]
            told = agents["a"].launches[-1].members
            found = json.loads(placement.output)["holders"]
            assert [list(member.holders) for member in told] == [holders[1:] for holders in found]
            return {names[own]: [names[other] for other in others] for own, *others in found}

        racks = {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}
        agents = {name: await joined(name, "lyon", rack) for name, rack in racks.items()}
        job = await head.submit((4, 4), checkpoint=common_pb2.CheckpointPolicy(memory_replicas=2))
        before = await kept(job, 1)
        assert all(racks[owner] != racks[other] for owner, (other,) in before.items()), before
        await agents.pop("d").disconnect()
        await agents["a"].until(lambda: bool(agents["a"].stopped))
        agents["e"] = await joined("e", "lyon", "r2")
        after = await kept(job, 2)
        assert after == {
            "e" if owner == "d" else owner: ["e" if other == "d" else other for other in others]
            for owner, others in before.items()
        }
        await head.stub.Cancel(pb.CancelRequest(job=job), timeout=CALL_S)
        await head.phase(job, pb.PHASE_CANCELLED)
        agents |= {name: await joined(name, "oslo", "r1") for name in "fghi"}
        policy = common_pb2.CheckpointPolicy(memory_replicas=2, site_safe=True)
        safe = await kept(await head.submit((8, 8), checkpoint=policy), 1)
        islands = {name: agent.register.island for name, agent in agents.items()}
        assert len(safe) == 8
        assert all(islands[owner] != islands[other] for owner, (other,) in safe.items()), safe
        await asyncio.gather(*(agent.disconnect() for agent in agents.values()))


async def test_cancel_stops_all_and_is_harmless_when_repeated(etcd: str, tmp_path: Path) -> None:
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        a = await FakeAgent("a", devices=2).connect(head.address)
        job = await head.submit((2, 2))
        await head.phase(job, pb.PHASE_RUNNING)
        await head.stub.Cancel(pb.CancelRequest(job=job), timeout=CALL_S)
        cancelled = await head.phase(job, pb.PHASE_CANCELLED)
        drained = common_pb2.EXIT_KIND_DRAINED  # it was not cancelled because they did not end in time
        assert [worker.status.exit_kind for worker in cancelled.workers] == [drained, drained]
        again = await head.stub.Cancel(pb.CancelRequest(job=job), timeout=CALL_S)
        assert again.phase == pb.PHASE_CANCELLED
        assert a.stopped[0].grace_s == PLAIN_GRACE_S  # nothing said that the script is Atoll's
        await a.until(lambda: len(a.forgotten) == 2)
        await a.disconnect()


async def test_cancel_does_not_wait_for_a_node_that_is_out_of_reach(etcd: str, tmp_path: Path) -> None:
    async with controller(tmp_path, etcd, node_lease_s=60) as head:
        await leading(head)
        a = await FakeAgent("a").connect(head.address)
        job = await head.submit((1, 1))
        await head.phase(job, pb.PHASE_RUNNING)
        await a.disconnect()
        await head.stub.Cancel(pb.CancelRequest(job=job), timeout=CALL_S)
        await head.phase(job, pb.PHASE_CANCELLED, within_s=30)
        await a.connect(head.address)  # with its worker: which is stopped now
        await a.until(lambda: a.forgotten == [(job, 1, 0)])
        await a.disconnect()


async def test_the_other_controller_leads_when_the_leader_dies(etcd: str, tmp_path: Path) -> None:
    async with controller(tmp_path / "one", etcd) as one:
        await leading(one)
        async with controller(tmp_path / "two", etcd) as two:
            job = await one.submit()
            async with asyncio.timeout(30):
                while (hint := await _leader_hint(two)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert hint == one.address
            one.task.cancel()
            await asyncio.wait({one.task})
            await leading(two)
            assert (await two.get(job)).phase == pb.PHASE_QUEUED
            a = await FakeAgent("a").connect(two.address)
            await two.phase(job, pb.PHASE_RUNNING)
            await a.end((job, 1, 0))
            await two.phase(job, pb.PHASE_DONE)
            await a.disconnect()


async def test_a_controller_that_was_restarted_sends_nobody_to_itself(
    etcd: str, store: EtcdStore, tmp_path: Path
) -> None:
    """1. The lease that it led by before it was killed still lasts. 2. Whoever asks is told so, and not that it leads.
    3. It does once that has run out."""
    address = f"127.0.0.1:{free_port()}"
    killed = Election(store, keys.LEADER, json.dumps({"address": address}).encode(), 60)
    before = await asyncio.wait_for(killed.campaign(), 30)
    async with controller(tmp_path, etcd, listen=address) as head:

        async def refusal() -> str:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await head.stub.List(pb.ListRequest(), timeout=CALL_S)
            assert leader_hint(refused.value) is None
            return refused.value.details() or ""

        async with asyncio.timeout(30):
            while "does not lead yet: it was restarted" not in (said := await refusal()):
                assert "none is known to" in said  # it has not looked
                await asyncio.sleep(0.02)
        await before.resign()
        await leading(head)


async def _leader_hint(standby: Controller) -> str | None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await standby.stub.List(pb.ListRequest(), timeout=CALL_S)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    return leader_hint(refused.value)


async def test_etcd_away_means_unavailable_in_time_and_then_it_goes_on(own_etcd: EtcdServer, tmp_path: Path) -> None:
    async with controller(tmp_path, own_etcd.endpoint, leader_lease_s=4) as head:
        await leading(head)
        a = await FakeAgent("a").connect(head.address)
        job = await head.submit()
        await head.phase(job, pb.PHASE_RUNNING)
        own_etcd.kill()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await head.submit()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE  # within the call's own deadline
        await a.until(lambda: a.failure is not None)  # it leads no more, and says so
        await a.disconnect()
        own_etcd.start()
        await leading(head)
        await a.connect(head.address)
        await a.end((job, 1, 0))
        await head.phase(job, pb.PHASE_DONE)
        assert a.launched == [(job, 1, 0)]
        await a.disconnect()


async def test_whoever_follows_is_told_when_the_controller_leads_no_more(etcd: str, tmp_path: Path) -> None:
    """Streams that have nothing to say, and would not for hours, neither hang nor hold the controller up."""
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        a = await FakeAgent("a").connect(head.address)
        job = await head.submit()
        await head.phase(job, pb.PHASE_RUNNING)
        streams = [
            head.stub.Events(pb.EventsRequest(follow=True), timeout=30),
            head.stub.Events(pb.EventsRequest(job=job, follow=True), timeout=30),
            head.stub.Watch(pb.WatchRequest(job=job), timeout=30),
            head.stub.Logs(pb.LogsRequest(job=job, follow=True), timeout=30),
        ]
        for stream in streams[:3]:
            await stream.read()
        head.stop.set()
        for stream in streams:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asyncio.wait_for(_heard_out(stream), 30)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        await asyncio.wait({head.task}, timeout=30)
        assert head.task.done()
        await a.disconnect()


async def _heard_out(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_a_repeated_submit_makes_no_second_job(etcd: str, tmp_path: Path) -> None:
    async with controller(tmp_path, etcd) as head:
        await leading(head)
        first = await head.submit(request_id="again")
        assert await head.submit(request_id="again") == first
        both = await asyncio.gather(*(head.submit(request_id="at-once") for _ in range(4)))
        assert len(set(both)) == 1
        assert len((await head.stub.List(pb.ListRequest(), timeout=CALL_S)).jobs) == 2


async def test_without_etcd_a_private_one_is_started_and_stopped(tmp_path: Path) -> None:
    async with controller(tmp_path, None) as head:
        await leading(head)
        job = await head.submit()
    async with controller(tmp_path, None) as head:
        await leading(head)
        assert (await head.get(job)).phase == pb.PHASE_QUEUED


async def test_two_controllers_do_not_share_a_data_folder_or_a_port(etcd: str, tmp_path: Path) -> None:
    async with controller(tmp_path / "one", etcd) as head:
        same_folder = ControllerSettings(data_dir=tmp_path / "one", etcd=(etcd,), listen="127.0.0.1:0")
        with pytest.raises(SettingError, match="in use by another controller"):
            await serve(same_folder, asyncio.Event())
        same_port = ControllerSettings(data_dir=tmp_path / "two", etcd=(etcd,), listen=head.address)
        with pytest.raises(SettingError, match="the port is in use"):
            await serve(same_port, asyncio.Event())


REFUSED_BESIDE_A_COLLECTING_HANDLER = """
import asyncio, gc, logging, pathlib, sys
from atoll.controller.daemon import serve
from atoll.controller.settings import ControllerSettings
from atoll.errors import SettingError

class Keeping(logging.Handler):
    records = []
    def emit(self, record):
        self.records.append(record)

logging.basicConfig(level=logging.DEBUG, handlers=[Keeping()])

async def refused():
    try:
        chosen = ControllerSettings(data_dir=pathlib.Path(sys.argv[1]), listen=sys.argv[2], etcd=("127.0.0.1:1",))
        await serve(chosen, asyncio.Event())
    except SettingError:
        return True
    return False

print(asyncio.run(refused()))
gc.collect()
for record in Keeping.records:
    record.getMessage()
"""


def test_a_controller_that_cannot_listen_leaves_no_freed_memory_to_the_log(tmp_path: Path) -> None:
    """1. A controller's port is in use: its gRPC server is never started. 2. grpcio logs that server at DEBUG while it
    is deallocated. 3. A handler that keeps records kept it, and the next garbage collection was a SIGSEGV, in this
    process or, where its memory had been used again, much later in another's test."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        listen = f"127.0.0.1:{held.getsockname()[1]}"
        ended = subprocess.run(
            [sys.executable, "-c", REFUSED_BESIDE_A_COLLECTING_HANDLER, str(tmp_path), listen],
            env={**os.environ, "PYTHONMALLOC": "debug"},  # freed memory does not look alive
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


async def test_health_tells_alive_from_leading(etcd: str, tmp_path: Path) -> None:
    async with controller(tmp_path, etcd) as head, open_channel(head.address, None) as channel:
        await leading(head)
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", "atoll.v1.JobService"):
            reply = await check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_controller_killed_with_sigkill_is_followed_by_another(etcd: str, tmp_path: Path) -> None:
    """It cannot say a word: its leader key goes with its lease, its agent finds the other and keeps its worker."""
    script = (
        "import asyncio, sys, pathlib\n"
        "from atoll.controller.daemon import serve\n"
        "from atoll.controller.settings import ControllerSettings\n"
        "settings = ControllerSettings(data_dir=pathlib.Path(sys.argv[1]), etcd=(sys.argv[2],), listen='127.0.0.1:0',\n"
        "    leader_lease_s=4, node_lease_s=2, heartbeat_s=0.2)\n"
        "asyncio.run(serve(settings, asyncio.Event()))\n"
    )
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(tmp_path / "one"), etcd)
    address = await told_address(tmp_path / "one" / "address")
    a = await connected(FakeAgent("a"), address)
    async with controller(tmp_path / "two", etcd) as two, open_channel(address, None) as channel:
        one = Controller(address, JobServiceStub(channel), two.task, two.stop)
        job = await one.submit()
        await one.phase(job, pb.PHASE_RUNNING)
        first.kill()
        await first.wait()
        await a.until(lambda: a.failure is not None)
        await a.disconnect()
        await leading(two)
        await a.connect(two.address)
        await a.end((job, 1, 0))
        await two.phase(job, pb.PHASE_DONE)
        assert (a.launched, a.stopped) == ([(job, 1, 0)], [])
        await a.disconnect()


async def connected(agent: FakeAgent, address: str) -> FakeAgent:
    """Connected to a controller that may not lead yet."""
    async with asyncio.timeout(30):
        while (await agent.connect(address)).failure is not None:
            await agent.disconnect()
    return agent
