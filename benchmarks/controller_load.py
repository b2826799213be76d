"""A real controller under many simulated agents: CPU share of one core, memory, and how fast a plan reaches everyone.

    python benchmarks/controller_load.py [--agents 200] [--devices 8] [--jobs 8] [--seconds 30] [--probes 40]
        [--each-step] [--python PYTHON]

Two processes play the agents over real gRPC (scripts/simulated_agents.py): one all but the probes, the other the
probes, some of each job's: what a plan takes to reach those is told, since a process that plays a thousand agents
answers late for all of them. Equal jobs span them all. Then half of the agents become twice as slow, so the
controller must replan; a push counts from the plan's event (same machine, same clock) to a probe's receipt.
--each-step: agents tell each step of each worker, as they do where a strategy asks for that; --python: of another tree,
whose controller is to be measured. Load is the mean of the last minute.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc.aio
import psutil

from atoll.jobs.code_bundle import pack
from atoll.network.rpc import open_channel
from atoll.v1 import common_pb2, jobs_pb2, jobs_pb2_grpc

AGENTS: Final = Path(__file__).resolve().parent / "scripts" / "simulated_agents.py"
DEADLINE_S: Final = 120.0


class Player:
    """A process that plays agents."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def started(cls, asked: dict[str, Any]) -> AsyncIterator[Player]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(AGENTS), json.dumps(asked), stdin=PIPE, stdout=PIPE, limit=2**26
        )
        try:
            yield cls(process)
        finally:
            if process.returncode is None:
                process.kill()
            await asyncio.wait_for(process.wait(), DEADLINE_S)

    async def ask(self, word: str) -> dict[str, Any]:
        """What has happened to it so far. Raises EOFError where it has ended; what it said stands above."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        async with asyncio.timeout(DEADLINE_S):
            line = await self._process.stdout.readline()
        if not line:
            raise EOFError("a process that plays agents ended")
        said: dict[str, Any] = json.loads(line)
        return said


async def submit(stub: jobs_pb2_grpc.JobServiceAsyncStub, workers: int) -> str:
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


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-load-") as folder:
        command = ("-m", "atoll.cli.main", "controller", "--listen", "127.0.0.1:0", "--data-dir", folder)
        with open(Path(folder, "controller.log"), "w") as log:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(options.python, *command, stdout=log, stderr=log)
        try:
            address_file = Path(folder, "address")
            async with asyncio.timeout(30):
                while not address_file.exists():
                    await asyncio.sleep(0.1)
            address = address_file.read_text().strip()
            await leading(address)
            await drive(options, address, psutil.Process(process.pid))
        except BaseException:
            said = Path(folder, "controller.log").read_text().splitlines()
            print("\n".join(line for line in said if ": agent sim-" not in line)[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 15)


async def leading(address: str) -> None:
    """Wait until the controller leads."""
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE_S):
        stub: jobs_pb2_grpc.JobServiceAsyncStub = jobs_pb2_grpc.JobServiceStub(channel)
        while True:
            try:
                await stub.ListNodes(jobs_pb2.ListNodesRequest(), timeout=10)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.1)


async def drive(options: argparse.Namespace, address: str, controller: psutil.Process) -> None:
    agents, workers = options.agents, options.agents * options.devices // options.jobs
    asked = {"address": address, "devices": options.devices, "workers": workers, "each_step": options.each_step}
    numbers = range(agents)
    probes = numbers[:: max(agents // options.probes, 1)]
    others = [number for number in numbers if number not in probes]
    began = time.monotonic()
    async with (
        Player.started({**asked, "numbers": others}) as crowd,
        Player.started({**asked, "numbers": list(probes)}) as probing,
        open_channel(address, None) as channel,
    ):
        stub: jobs_pb2_grpc.JobServiceAsyncStub = jobs_pb2_grpc.JobServiceStub(channel)
        async with asyncio.timeout(DEADLINE_S):
            while len((await stub.ListNodes(jobs_pb2.ListNodesRequest(), timeout=10)).nodes) < agents:
                await asyncio.sleep(0.2)
            print(f"{agents} agents registered after {time.monotonic() - began:.1f} s")
            submitted = time.monotonic()
            jobs = [await submit(stub, workers) for _ in range(options.jobs)]
            while sum([(await one.ask("look"))["running"] for one in (crowd, probing)]) < options.jobs * workers:
                await asyncio.sleep(0.1)
            took_s = time.monotonic() - submitted
            print(f"all {options.jobs * workers} workers launched {took_s:.2f} s after the submit")
        await sample(controller, (crowd, probing), options.seconds / 2, "look", "steady")
        await sample(controller, (crowd, probing), options.seconds / 2, "slow", "while replanning")
        born = {job: await planned(stub, job) for job in jobs}  # first: when agents end, the controller has much to do
        report_pushes(born, (await probing.ask("stop"))["receipts"])


async def sample(controller: psutil.Process, players: Sequence[Player], seconds: float, word: str, label: str) -> None:
    """CPU time and what was told meanwhile: on a busy machine agents tell less, and the share of a core says little."""
    children = controller.children(recursive=True)
    began, told = time.monotonic(), sum([(await one.ask(word))["told_steps"] for one in players])
    cpu_s, etcd_s = cpu_seconds(controller), sum(map(cpu_seconds, children))
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began
    ended = [await one.ask("look") for one in players]
    steps, returns = sum(one["told_steps"] for one in ended) - told, sum(one["returns"] for one in ended)
    cpu_s, etcd_s = cpu_seconds(controller) - cpu_s, sum(map(cpu_seconds, children)) - etcd_s
    rss_mib = controller.memory_info().rss / 2**20
    print(
        f"{label}: controller {100 * cpu_s / took_s:.1f} % of one core, {1e6 * cpu_s / max(steps, 1):.1f} us for each "
        f"of {steps / took_s:.0f} steps/s told, {rss_mib:.0f} MiB; etcd {100 * etcd_s / took_s:.1f} %; "
        f"load {os.getloadavg()[0]:.1f}" + f"; {returns} streams ended so far" * bool(returns)
    )


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def planned(stub: jobs_pb2_grpc.JobServiceAsyncStub, job: str) -> dict[str, float]:
    """When each of its plans was told, by number; the first, which comes with the launch, is not."""
    events = stub.Events(jobs_pb2.EventsRequest(job=job), timeout=DEADLINE_S)
    return {str(event.plan): event.unix_s async for event in events if event.kind == common_pb2.EVENT_KIND_PLAN_ISSUED}


def report_pushes(born: dict[str, dict[str, float]], receipts: dict[str, list[float]]) -> None:
    took_ms, plans = [], 0
    for job, numbers in born.items():
        for number, unix_s in numbers.items():
            came = receipts.get(f"{job} {number}", [])
            took_ms += [(at - unix_s) * 1e3 for at in came]
            plans += bool(came)
    if not took_ms:
        print("no plan was pushed")
        return
    took_ms.sort()
    p99_ms = took_ms[min(len(took_ms) - 1, int(len(took_ms) * 0.99))]
    print(
        f"{plans} plans reached {len(took_ms) / plans:.0f} probes each: p50 {statistics.median(took_ms):.0f} ms, "
        f"p99 {p99_ms:.0f} ms, most {took_ms[-1]:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--probes", type=int, default=40)
    parser.add_argument("--each-step", action="store_true")
    parser.add_argument("--python", default=sys.executable)

    options = parser.parse_args()
    print(
        f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, {options.agents} agents of "
        f"{options.devices} devices at 1 Hz, {options.jobs} jobs"
    )
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
