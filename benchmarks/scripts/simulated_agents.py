"""Agents for benchmarks/controller_load.py: one process plays many over real gRPC, and is told on its stdin what to do.

Each beats once a second, obeys launches and plans, and tells what it made of ten steps of each of its workers. A line
in (look, slow, stop), a line of JSON out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Final

import grpc.aio

from atoll.agent.incoming import each_worker
from atoll.network.rpc import CLIENT_OPTIONS
from atoll.step_estimators.estimates import BatchPoint, RankEstimate, RankProfile
from atoll.step_estimators.sums import SyncSums
from atoll.step_estimators.wire import estimate_to_wire, sums_to_wire
from atoll.v1 import agents_pb2, agents_pb2_grpc, common_pb2

BATCH: Final = 32
STEPS: Final = 10


@dataclass
class Fleet:
    """numbers: of the agents that this process plays. workers: of a job. each_step: agents tell each step of each
    worker, as they do where a strategy asks for that."""

    address: str
    numbers: list[int]
    devices: int
    workers: int
    each_step: bool


@dataclass
class Played:
    slow: bool = False
    running: int = 0
    told_steps: int = 0
    returns: int = 0
    """Streams that the controller ended, most likely because this process was late; agents come back."""
    receipts: dict[str, list[float]] = field(default_factory=dict)
    """By job and plan, when each agent had it (wall clock: the same machine's as the controller's)."""


class SimulatedAgent:
    """Obeys launches and plans, and tells of invented steps at the speed it pretends to have."""

    def __init__(self, fleet: Fleet, played: Played, number: int) -> None:
        self._fleet, self._played, self._number = fleet, played, number
        self._session = uuid.uuid4().hex
        self._workers: dict[int, common_pb2.WorkerStatus] = {}
        self._batches: dict[int, int] = {}
        self._step = 0
        self._told: agents_pb2.Telemetry | None = None
        self._told_slow = False
        self.changed = asyncio.Event()

    def register(self) -> agents_pb2.Register:
        devices = [
            common_pb2.Device(index=i, kind="cpu", model="simulated", memory_bytes=2**34, speed=1.0)
            for i in range(self._fleet.devices)
        ]
        return agents_pb2.Register(
            name=f"sim-{self._number:04d}", session=self._session, island="default", address="127.0.0.1",
            memory_bytes=2**35, devices=devices, rendezvous_ports=[20000 + self._number], protocol=1,
            unix_s=time.time(), version="0.1.0", workers=self._workers.values(),
        )  # fmt: skip

    def heartbeat(self) -> agents_pb2.Heartbeat:
        return agents_pb2.Heartbeat(rendezvous_ports=[20000 + self._number], workers=self._workers.values())

    def take(self, message: agents_pb2.ControllerMessage) -> None:
        body = message.WhichOneof("body")
        if body == "launch":
            for launch in each_worker(message.launch):
                view = common_pb2.ViewReport(view=1, stage=common_pb2.VIEW_STAGE_TRAINING)
                self._workers[launch.id.rank] = common_pb2.WorkerStatus(
                    id=launch.id, state=common_pb2.WORKER_STATE_RUNNING, pid=1, uses_atoll=True, plan=1, view=view
                )
                self._batches[launch.id.rank] = BATCH
                self._played.running += 1
            self._told = None
            self.changed.set()
        elif body == "plan":
            self._played.receipts.setdefault(f"{message.plan.job} {message.plan.plan.id}", []).append(time.time())
            shares = message.plan.plan.shares
            samples = BATCH * self._fleet.workers / sum(shares)
            for rank, worker in self._workers.items():
                worker.plan = message.plan.plan.id
                self._batches[rank] = max(1, round(shares[rank] * samples))
            self._told = None

    def telemetry(self) -> agents_pb2.Telemetry:
        """Of the ten steps of the last second."""
        if self._told is None or self._told_slow != self._played.slow:
            self._told, self._told_slow = self._made(), self._played.slow
        else:
            _go_on(self._told)
        self._step += STEPS
        for worker in self._workers.values():
            worker.step = worker.view.step = self._step
        self._played.told_steps += STEPS * len(self._workers)
        return self._told

    def _made(self) -> agents_pb2.Telemetry:
        fleet, telemetry = self._fleet, agents_pb2.Telemetry()
        slower = 2 if self._played.slow and self._number % 2 else 1
        for rank, worker in self._workers.items():
            compute_s = 0.001 * slower * self._batches[rank]
            told = telemetry.workers.add(id=worker.id)
            first = 0 if rank == 0 or fleet.each_step else STEPS - 1
            for step in range(self._step + first, self._step + STEPS):
                told.steps.add(
                    step=step, local_batch=self._batches[rank], total_batch=BATCH * fleet.workers, step_s=0.1,
                    compute_s=compute_s, wait_s=0.01, plan=worker.plan,
                )  # fmt: skip
            if not fleet.each_step:
                told.estimate.CopyFrom(estimate_to_wire(self._estimate(worker.plan, self._batches[rank], compute_s)))
        if self._workers and not fleet.each_step:
            some = next(iter(self._workers.values())).id
            sums = {self._step + i: SyncSums(len(self._workers), 0.01, 0.01) for i in range(STEPS)}
            telemetry.sums.append(sums_to_wire(some.job, some.run, 0, sums, {}))
        return telemetry

    def _estimate(self, plan: int, batch: int, compute_s: float) -> RankEstimate:
        profile = RankProfile(
            plan=plan, local_batch=batch, compute_s=compute_s, compute_error_s=0.002 * compute_s, steps=16,
            points=(BatchPoint(batch, compute_s, 0.005),),
        )  # fmt: skip
        return RankEstimate(
            plan=plan, total_batch=BATCH * self._fleet.workers, last_step=self._step + STEPS - 1, step_s=0.1,
            whole_steps=16, measured=True, profile=profile,
        )  # fmt: skip


def _go_on(telemetry: agents_pb2.Telemetry) -> None:
    """The same of the next steps: who plays a thousand agents cannot make all of it anew each second."""
    for worker in telemetry.workers:
        for sample in worker.steps:
            sample.step += STEPS
        if worker.HasField("estimate"):
            worker.estimate.last_step += STEPS
    for sums in telemetry.sums:
        sums.steps[:] = [step + STEPS for step in sums.steps]


async def simulate(fleet: Fleet, played: Played, number: int) -> None:
    channel = grpc.aio.insecure_channel(fleet.address, options=(*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
    agent = SimulatedAgent(fleet, played, number)

    async def say() -> AsyncIterator[agents_pb2.AgentMessage]:
        yield agents_pb2.AgentMessage(register=agent.register())
        while True:
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

    try:
        while True:
            call = agents_pb2_grpc.AgentServiceStub(channel).Connect(say())
            try:
                async for message in call:
                    agent.take(message)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            finally:
                call.cancel()
            played.returns += 1
    finally:
        await channel.close()


async def play(fleet: Fleet) -> None:
    played, lines = Played(), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing = [asyncio.create_task(simulate(fleet, played, number)) for number in fleet.numbers]
    while (told := (await lines.readline()).decode().strip()) not in ("", "stop"):
        for task in playing:
            if task.done():
                task.result()
                raise RuntimeError("the controller ended a stream")
        played.slow = played.slow or told == "slow"
        print(json.dumps({**asdict(played), "receipts": {}}), flush=True)
    print(json.dumps(asdict(played)), flush=True)
    for task in playing:
        task.cancel()
    await asyncio.wait(playing)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    asyncio.run(play(Fleet(**asked)))
