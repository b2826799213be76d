"""A real controller under many simulated agents: CPU share of one core, memory, and how fast a plan reaches everyone.

    python benchmarks/controller_load.py [--agents 200] [--devices 8] [--jobs 8] [--seconds 30] [--each-step]
        [--python PYTHON]

One process makes all agents over real gRPC; each beats once a second and tells what it made of ten steps of each of its
workers. Equal jobs span them all. Then half of the agents become twice as slow, so the controller
must replan; the push latency is from the plan's event (same machine, same clock) to each agent's receipt. --each-step:
agents tell each step of each worker, as they do where a strategy asks for that; --python: of another tree, whose
controller is to be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

from atoll.agent.incoming import each_worker
from atoll.rpc import CLIENT_OPTIONS, open_channel
from atoll.step_estimators.estimates import BatchPoint, RankEstimate, RankProfile
from atoll.step_estimators.sums import SyncSums
from atoll.step_estimators.wire import estimate_to_wire, sums_to_wire
from atoll.v1 import agents_pb2, agents_pb2_grpc, common_pb2, jobs_pb2, jobs_pb2_grpc

BATCH = 32
STEPS = 10


@dataclass
class Fleet:
    agents: int
    devices: int
    jobs: int
    each_step: bool
    slow: bool = False
    running: int = 0
    told_steps: int = 0
    plan_receipts: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    share_sums: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Of a job."""
        return self.agents * self.devices // self.jobs

    @property
    def total_batch(self) -> int:
        return BATCH * self.workers

    def received(self, message: agents_pb2.PlanForJob) -> float:
        """Note a plan's receipt. Returns the samples of a step for each of its shares."""
        key = (message.job, message.plan.id)
        self.plan_receipts.setdefault(key, []).append(time.time())
        if key not in self.share_sums:  # once: this one process plays all agents
            self.share_sums[key] = sum(message.plan.shares)
        return self.total_batch / self.share_sums[key]


class SimulatedAgent:
    """Obeys launches and plans, and tells of invented steps at the speed it pretends to have."""

    def __init__(self, fleet: Fleet, index: int) -> None:
        self._fleet, self._index = fleet, index
        self._workers: dict[int, common_pb2.WorkerStatus] = {}
        self._batches: dict[int, int] = {}
        self._step = 0
        self.changed = asyncio.Event()

    def register(self) -> agents_pb2.Register:
        devices = [
            common_pb2.Device(index=i, kind="cpu", model="simulated", memory_bytes=2**34, speed=1.0)
            for i in range(self._fleet.devices)
        ]
        return agents_pb2.Register(
            name=f"sim-{self._index:04d}", session=uuid.uuid4().hex, island="default", address="127.0.0.1",
            memory_bytes=2**35, devices=devices, rendezvous_ports=[20000 + self._index], protocol=1,
            unix_s=time.time(), version="0.1.0",
        )  # fmt: skip

    def heartbeat(self) -> agents_pb2.Heartbeat:
        return agents_pb2.Heartbeat(rendezvous_ports=[20000 + self._index], workers=self._workers.values())

    def take(self, message: agents_pb2.ControllerMessage) -> None:
        body = message.WhichOneof("body")
        if body == "launch":
            for launch in each_worker(message.launch):
                self._workers[launch.id.rank] = common_pb2.WorkerStatus(
                    id=launch.id, state=common_pb2.WORKER_STATE_RUNNING, pid=1, uses_atoll=True, plan=1
                )
                self._batches[launch.id.rank] = BATCH
                self._fleet.running += 1
            self.changed.set()
        elif body == "plan":
            samples, plan = self._fleet.received(message.plan), message.plan.plan
            for rank, worker in self._workers.items():
                worker.plan = plan.id
                self._batches[rank] = max(1, round(plan.shares[rank] * samples))

    def telemetry(self) -> agents_pb2.Telemetry:
        """Of the ten steps of the last second."""
        telemetry = agents_pb2.Telemetry()
        slower = 2 if self._fleet.slow and self._index % 2 else 1
        for rank, worker in self._workers.items():
            compute_s = 0.001 * slower * self._batches[rank]
            told = telemetry.workers.add(id=worker.id)
            first = 0 if rank == 0 or self._fleet.each_step else STEPS - 1
            for step in range(self._step + first, self._step + STEPS):
                told.steps.add(
                    step=step, local_batch=self._batches[rank], total_batch=self._fleet.total_batch, step_s=0.1,
                    compute_s=compute_s, wait_s=0.01, plan=worker.plan,
                )  # fmt: skip
            if not self._fleet.each_step:
                told.estimate.CopyFrom(estimate_to_wire(self._estimate(worker.plan, self._batches[rank], compute_s)))
            worker.step = self._step + STEPS
        if self._workers and not self._fleet.each_step:
            some = next(iter(self._workers.values())).id
            sums = {self._step + i: SyncSums(len(self._workers), 0.01, 0.01) for i in range(STEPS)}
            telemetry.sums.append(sums_to_wire(some.job, some.run, 0, sums, {}))
        self._step += STEPS
        self._fleet.told_steps += STEPS * len(self._workers)
        return telemetry

    def _estimate(self, plan: int, batch: int, compute_s: float) -> RankEstimate:
        profile = RankProfile(
            plan=plan, local_batch=batch, compute_s=compute_s, compute_error_s=0.002 * compute_s, steps=16,
            points=(BatchPoint(batch, compute_s, 0.005),),
        )  # fmt: skip
        return RankEstimate(
            plan=plan, total_batch=self._fleet.total_batch, last_step=self._step + STEPS - 1, step_s=0.1,
            whole_steps=16, measured=True, profile=profile,
        )  # fmt: skip


async def simulate_agent(fleet: Fleet, index: int, address: str, stop: asyncio.Event) -> None:
    channel = grpc.aio.insecure_channel(address, options=(*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
    agent = SimulatedAgent(fleet, index)

    async def say() -> AsyncIterator[agents_pb2.AgentMessage]:
        yield agents_pb2.AgentMessage(register=agent.register())
        while not stop.is_set():
            yield agents_pb2.AgentMessage(heartbeat=agent.heartbeat())
            telemetry = agent.telemetry()
            if telemetry.workers:
                yield agents_pb2.AgentMessage(telemetry=telemetry)
            agent.changed.clear()
            try:
                async with asyncio.timeout(1.0):
                    await agent.changed.wait()
            except TimeoutError:
                continue

    stub = agents_pb2_grpc.AgentServiceStub(channel)
    call = stub.Connect(say())
    try:
        async for message in call:
            agent.take(message)
            if stop.is_set():
                break
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        if not stop.is_set():
            raise
    finally:
        call.cancel()
        await channel.close()


async def submit(stub: jobs_pb2_grpc.JobServiceAsyncStub, workers: int) -> str:
    from atoll.bundle import pack

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "nothing.py")
        script.write_text("print('simulated')\n")
        bundle = pack(script)

    async def parts() -> AsyncIterator[jobs_pb2.SubmitRequest]:
        spec = common_pb2.JobSpec(
            name="load", script="nothing.py", min_workers=workers, max_workers=workers, code_sha256=bundle.sha256,
            split="inverse-time",
        )  # fmt: skip
        yield jobs_pb2.SubmitRequest(header=jobs_pb2.SubmitHeader(spec=spec, request_id=uuid.uuid4().hex))
        yield jobs_pb2.SubmitRequest(code=bundle.data)

    return (await stub.Submit(parts(), timeout=30)).job


async def measure(fleet: Fleet, seconds: float, python: str) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-load-") as folder:
        command = (
            python,
            "-m",
            "atoll.cli.main",
            "controller",
            "--listen",
            "127.0.0.1:0",
            "--data-dir",
            folder,
        )
        with open(Path(folder, "controller.log"), "w") as log:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            address_file = Path(folder, "address")
            async with asyncio.timeout(30):
                while not address_file.exists():
                    await asyncio.sleep(0.1)
            await drive(fleet, seconds, address_file.read_text().strip(), psutil.Process(process.pid))
        except BaseExceptionGroup:
            told = [
                line for line in Path(folder, "controller.log").read_text().splitlines() if ": agent sim-" not in line
            ]
            print("\n".join(told)[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 15)


async def drive(fleet: Fleet, seconds: float, address: str, controller: psutil.Process) -> None:
    agents, workers, stop = fleet.agents, fleet.jobs * fleet.workers, asyncio.Event()
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for index in range(agents):
            group.create_task(simulate_agent(fleet, index, address, stop))
        channel = open_channel(address, None)
        stub: jobs_pb2_grpc.JobServiceAsyncStub = jobs_pb2_grpc.JobServiceStub(channel)
        async with asyncio.timeout(120):
            while len((await stub.ListNodes(jobs_pb2.ListNodesRequest(), timeout=10)).nodes) < agents:
                await asyncio.sleep(0.2)
            print(f"{agents} agents registered after {time.monotonic() - began:.1f} s")
            submitted = time.monotonic()
            jobs = [await submit(stub, fleet.workers) for _ in range(fleet.jobs)]
            while fleet.running < workers:
                await asyncio.sleep(0.05)
            print(f"all {workers} workers launched {time.monotonic() - submitted:.2f} s after the submit")
        await sample(controller, fleet, seconds / 2, "steady")
        fleet.slow = True
        await sample(controller, fleet, seconds / 2, "while replanning")
        for job in jobs:
            await report_pushes(stub, job, fleet)
        stop.set()
        await channel.close()


async def sample(controller: psutil.Process, fleet: Fleet, seconds: float, label: str) -> None:
    """CPU time and what was told meanwhile: on a busy machine agents tell less, and the share of a core says little."""
    children = controller.children(recursive=True)
    began, told = time.monotonic(), fleet.told_steps
    cpu_s, etcd_s = cpu_seconds(controller), sum(map(cpu_seconds, children))
    await asyncio.sleep(seconds)
    took_s, steps = time.monotonic() - began, fleet.told_steps - told
    cpu_s, etcd_s = cpu_seconds(controller) - cpu_s, sum(map(cpu_seconds, children)) - etcd_s
    rss_mib = controller.memory_info().rss / 2**20
    print(
        f"{label}: controller {100 * cpu_s / took_s:.1f} % of one core, {1e6 * cpu_s / max(steps, 1):.1f} us for each "
        f"of {steps / took_s:.0f} steps/s told, {rss_mib:.0f} MiB; etcd {100 * etcd_s / took_s:.1f} %"
    )


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def report_pushes(stub: jobs_pb2_grpc.JobServiceAsyncStub, job: str, fleet: Fleet) -> None:
    events = stub.Events(jobs_pb2.EventsRequest(job=job), timeout=30)
    born = [event.unix_s async for event in events if event.kind == "plan"]
    plans = sorted(key for key in fleet.plan_receipts if key[0] == job)
    for plan, unix_s in zip(reversed(plans), reversed(born), strict=False):
        took_ms = sorted((at - unix_s) * 1e3 for at in fleet.plan_receipts[plan])
        p99 = took_ms[min(len(took_ms) - 1, int(len(took_ms) * 0.99))]
        median = statistics.median(took_ms)
        print(f"plan {plan[1]} of {job}: reached {len(took_ms)} agents, p50 {median:.1f} ms, p99 {p99:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--each-step", action="store_true")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    print(
        f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, {options.agents} agents of "
        f"{options.devices} devices at 1 Hz, {options.jobs} jobs"
    )
    fleet = Fleet(options.agents, options.devices, options.jobs, options.each_step)
    asyncio.run(measure(fleet, options.seconds, options.python))


if __name__ == "__main__":
    main()
