"""A real controller under many simulated agents: CPU share of one core, memory, and how fast a plan reaches everyone.

    python benchmarks/controller_load.py [--agents 200] [--seconds 30]

One process makes all agents over real gRPC; each beats and reports ten steps of telemetry once a second. One job spans
all of them. Then half of the agents become twice as slow, so the controller must replan; the push latency is from the
plan's event (same machine, same clock) to each agent's receipt.
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

from atoll.rpc import CLIENT_OPTIONS, open_channel
from atoll.v1 import agents_pb2, agents_pb2_grpc, common_pb2, jobs_pb2, jobs_pb2_grpc

TOTAL_BATCH_PER_AGENT = 32


@dataclass
class Fleet:
    agents: int
    slow: bool = False
    running: int = 0
    told_steps: int = 0
    plan_receipts: dict[int, list[float]] = field(default_factory=dict)
    share_sums: dict[int, float] = field(default_factory=dict)

    def received(self, plan: common_pb2.Plan, worker: common_pb2.WorkerStatus | None) -> float:
        """Note a plan's receipt; returns the samples of a step that it gives this worker."""
        self.plan_receipts.setdefault(plan.id, []).append(time.time())
        if plan.id not in self.share_sums:  # once: this one process plays all agents
            self.share_sums[plan.id] = sum(plan.shares)
        if worker is None:
            return float(TOTAL_BATCH_PER_AGENT)
        worker.plan = plan.id
        return plan.shares[worker.id.rank] / self.share_sums[plan.id] * TOTAL_BATCH_PER_AGENT * self.agents


async def simulate_agent(fleet: Fleet, index: int, address: str, stop: asyncio.Event) -> None:
    """One agent: registers, obeys launches, and reports invented steps at the speed it pretends to have."""
    channel = grpc.aio.insecure_channel(address, options=(*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
    worker: common_pb2.WorkerStatus | None = None
    share, step = float(TOTAL_BATCH_PER_AGENT), 0
    changed = asyncio.Event()

    async def say() -> AsyncIterator[agents_pb2.AgentMessage]:
        nonlocal step
        device = common_pb2.Device(index=0, kind="cpu", model="simulated", memory_bytes=2**34, speed=1.0)
        yield agents_pb2.AgentMessage(
            register=agents_pb2.Register(
                name=f"sim-{index:04d}", session=uuid.uuid4().hex, island="default", address="127.0.0.1",
                memory_bytes=2**35, devices=[device], rendezvous_ports=[20000 + index], protocol=1, unix_s=time.time(),
                version="0.1.0",
            )
        )  # fmt: skip
        while not stop.is_set():
            beat = agents_pb2.Heartbeat(rendezvous_ports=[20000 + index], workers=[worker] if worker else [])
            yield agents_pb2.AgentMessage(heartbeat=beat)
            if worker is not None and worker.state == common_pb2.WORKER_STATE_RUNNING:
                per_sample = 0.002 if fleet.slow and index % 2 else 0.001
                local = max(1, round(share))
                steps = [
                    common_pb2.StepSample(
                        step=step + k, local_batch=local, total_batch=TOTAL_BATCH_PER_AGENT * fleet.agents,
                        step_s=0.1, compute_s=per_sample * local, wait_s=0.01, plan=worker.plan,
                    )
                    for k in range(1, 11)
                ]  # fmt: skip
                step += 10
                fleet.told_steps += 10
                worker.step = step
                report = agents_pb2.WorkerTelemetry(id=worker.id, steps=steps)
                yield agents_pb2.AgentMessage(telemetry=agents_pb2.Telemetry(workers=[report]))
            changed.clear()
            try:
                async with asyncio.timeout(1.0):
                    await changed.wait()
            except TimeoutError:
                continue

    stub = agents_pb2_grpc.AgentServiceStub(channel)
    call = stub.Connect(say())
    try:
        async for message in call:
            body = message.WhichOneof("body")
            if body == "launch":
                worker = common_pb2.WorkerStatus(
                    id=message.launch.id, state=common_pb2.WORKER_STATE_RUNNING, pid=1, uses_atoll=True, plan=1
                )
                fleet.running += 1
                changed.set()
            elif body == "plan":
                share = fleet.received(message.plan.plan, worker)
            if stop.is_set():
                break
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        if not stop.is_set():
            raise
    finally:
        call.cancel()
        await channel.close()


async def submit(stub: jobs_pb2_grpc.JobServiceAsyncStub, agents: int) -> str:
    from atoll.bundle import pack

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "nothing.py")
        script.write_text("print('simulated')\n")
        bundle = pack(script)

    async def parts() -> AsyncIterator[jobs_pb2.SubmitRequest]:
        spec = common_pb2.JobSpec(
            name="load", script="nothing.py", min_workers=agents, max_workers=agents, code_sha256=bundle.sha256,
            split="inverse-time",
        )  # fmt: skip
        yield jobs_pb2.SubmitRequest(header=jobs_pb2.SubmitHeader(spec=spec, request_id=uuid.uuid4().hex))
        yield jobs_pb2.SubmitRequest(code=bundle.data)

    return (await stub.Submit(parts(), timeout=30)).job


async def measure(agents: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-load-") as folder:
        command = (
            sys.executable,
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
            await drive(agents, seconds, address_file.read_text().strip(), psutil.Process(process.pid))
        except BaseExceptionGroup:
            told = [
                line for line in Path(folder, "controller.log").read_text().splitlines() if ": agent sim-" not in line
            ]
            print("\n".join(told)[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 15)


async def drive(agents: int, seconds: float, address: str, controller: psutil.Process) -> None:
    fleet, stop = Fleet(agents), asyncio.Event()
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
            job = await submit(stub, agents)
            submitted = time.monotonic()
            while fleet.running < agents:
                await asyncio.sleep(0.05)
            print(f"all {agents} workers launched {time.monotonic() - submitted:.2f} s after the submit")
        await sample(controller, fleet, seconds / 2, "steady")
        fleet.slow = True
        await sample(controller, fleet, seconds / 2, "while replanning")
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
    plans = sorted(fleet.plan_receipts)
    for plan, unix_s in zip(reversed(plans), reversed(born), strict=False):
        took_ms = sorted((at - unix_s) * 1e3 for at in fleet.plan_receipts[plan])
        p99 = took_ms[min(len(took_ms) - 1, int(len(took_ms) * 0.99))]
        median = statistics.median(took_ms)
        print(f"plan {plan}: reached {len(took_ms)} of {fleet.agents}, p50 {median:.1f} ms, p99 {p99:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    print(f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, {options.agents} agents at 1 Hz")
    asyncio.run(measure(options.agents, options.seconds))


if __name__ == "__main__":
    main()
