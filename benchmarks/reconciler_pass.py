"""One pass of the reconciler over a large cluster: processor time of this process, median and most of the passes.

    python benchmarks/reconciler_pass.py [--nodes 1000] [--devices 8] [--jobs 100]

The real reconciler, ledger, sessions and estimators, with agents that obey at once (tests/controller/jobs/lives.py) and
a store in memory. Each job has the same part of all devices, and all train: between passes that are timed profiles
become due, so each makes them anew, of as many ranks as a pass takes on.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Final

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "controller" / "jobs")]

from lives import Agent, Cluster, Life

from atoll.agent.telemetry.collect import Collector
from atoll.cli.commands.daemons import tune_collector
from atoll.controller.jobs.lifecycle.reconciler import RANKS_A_PASS, RANKS_A_SECOND
from atoll.controller.state.records import JobPhase
from atoll.controller.state.store import (
    Change,
    Delete,
    DeletePrefix,
    Entry,
    Fence,
    Put,
    StateStore,
    StoreSnapshot,
    Unchanged,
    WatchBatch,
)
from atoll.jobs.worker_key import WorkerKey
from atoll.v1 import agents_pb2, common_pb2

STEPS_TOLD: Final = 10
BATCH: Final = 32
VARIANTS: Final = 64
TRAINING: Final = common_pb2.ViewReport(view=1, stage=common_pb2.VIEW_STAGE_TRAINING)


class MemoryStore(StateStore):
    """Keys and values in this process: what etcd takes of the time is its own."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._revision = 0

    async def read(self, key: str) -> Entry | None:
        return self._entries.get(key)

    async def read_prefix(self, prefix: str, *, keys_only: bool = False) -> StoreSnapshot:
        found = sorted(key for key in self._entries if key.startswith(prefix))
        return StoreSnapshot(self._revision, {key: self._entries[key] for key in found})

    async def commit(
        self, changes: Sequence[Change], conditions: Sequence[Unchanged] = (), fence: Fence | None = None
    ) -> int:
        self._revision += 1
        for change in changes:
            match change:
                case Put(key, value, lease):
                    before = self._entries.get(key)
                    created = before.create_revision if before else self._revision
                    self._entries[key] = Entry(key, value, self._revision, created, lease)
                case Delete(key):
                    self._entries.pop(key, None)
                case DeletePrefix(prefix):
                    for key in [key for key in self._entries if key.startswith(prefix)]:
                        del self._entries[key]
        return self._revision

    async def grant_lease(self, ttl_s: int) -> int:
        return 1

    def refresh_lease(self, lease: int, timeout_s: float) -> float:
        return 60.0

    async def revoke_lease(self, lease: int) -> None: ...

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        await asyncio.Event().wait()
        yield WatchBatch(0, ())

    async def close(self) -> None: ...


class TrainingAgent(Agent):
    """Its workers train as soon as they are started."""

    told: Sequence[agents_pb2.WorkerTelemetry] = ()
    """By VARIANTS unequal workers: making 8,000 of them would take longer than what is measured."""

    def train(self, step: int, told: Sequence[agents_pb2.WorkerTelemetry]) -> None:
        self.told = told
        for status in self.workers.values():
            status.step = step
            status.view.CopyFrom(TRAINING)
            status.view.step = step

    def telemetry(self) -> list[agents_pb2.WorkerTelemetry]:
        found = []
        for number, (job, run, rank) in enumerate(self.workers):
            telemetry = agents_pb2.WorkerTelemetry(id=common_pb2.WorkerId(job=job, run=run, rank=rank))
            telemetry.MergeFrom(self.told[(number + rank) % VARIANTS])
            found.append(telemetry)
        return found


class LargeCluster(Cluster):
    def __init__(self, nodes: int, devices: int, seed: int = 0) -> None:
        super().__init__(MemoryStore())
        names = [f"node-{index:04d}" for index in range(nodes)]
        self.training = [TrainingAgent(name, devices=devices) for name in names]
        self.agents |= {agent.name: agent for agent in self.training}
        self.life = self.leader = Life(self, self.store, Fence("/atoll/leader", 1))
        self._random = random.Random(seed)
        self._step = 0
        self._collector = Collector()
        for number in range(VARIANTS):
            self._collector.estimate(WorkerKey("variant", 1, number + 1))

    async def submit(self, jobs: int, workers: int) -> None:
        for number in range(jobs):
            await self.leader.submit(f"job-{number:03d}-0001", (workers, workers), name=f"job-{number:03d}")

    def report(self) -> None:
        """All agents beat, and tell what they made of the steps of the last interval."""
        told = [self._variant(number) for number in range(VARIANTS)]
        self._step += STEPS_TOLD
        for agent in self.training:
            agent.train(self._step, told)
        self.leader.report()

    def _variant(self, number: int) -> agents_pb2.WorkerTelemetry:
        key, plan = WorkerKey("variant", 1, number + 1), int(self._step > 0)
        batch = BATCH if plan else BATCH // 2  # so that each has a line, as it has after its first new plan
        steps = [
            common_pb2.StepSample(
                step=self._step + i, local_batch=batch, total_batch=batch, plan=plan, step_s=0.1,
                compute_s=(0.02 + 0.06 * batch / BATCH) * self._random.gauss(1.0, 0.02), backward_s=0.03,
            )
            for i in range(STEPS_TOLD)
        ]  # fmt: skip
        self._collector.add(key, agents_pb2.WorkerTelemetry(id=key.to_wire(), steps=steps))
        (message,) = self._collector.take()
        (worker,) = message.workers
        worker.ClearField("id")
        return worker

    async def pass_s(self) -> float:
        """Processor time of one pass, in seconds."""
        began_s = time.process_time()
        await self.leader.reconciler.once()
        return time.process_time() - began_s

    def phases(self) -> set[JobPhase]:
        return {state.job.status.phase for state in self.leader.ledger.jobs.values()}


async def measure(nodes: int, devices: int, jobs: int, passes: int) -> None:
    cluster = LargeCluster(nodes, devices)
    await cluster.submit(jobs, nodes * devices // jobs)
    began_s, launching_s = time.monotonic(), 0.0
    while cluster.phases() != {JobPhase.RUNNING}:
        if time.monotonic() - began_s > 120:
            raise TimeoutError(f"the jobs do not all train: {cluster.phases()}")
        cluster.now_s += 0.5
        cluster.report()
        launching_s = max(launching_s, await cluster.pass_s())
        await cluster.leader.obey()
    took_s, second_s = [], []
    every_s = max(1.0, nodes * devices / RANKS_A_SECOND)
    for number in range(passes + 3):
        cluster.now_s += every_s
        cluster.report()
        took = [await cluster.pass_s() for _ in range(math.ceil(nodes * devices / RANKS_A_PASS))]
        await cluster.leader.obey()
        if number >= 3:  # enough steps for a profile
            took_s.append(took[0])
            second_s.append(sum(took) / every_s)
    quiet_s = []
    for _ in range(passes):
        cluster.now_s += 0.05
        quiet_s.append(await cluster.pass_s())
    print(f"longest pass while {jobs} jobs of {nodes * devices // jobs} workers start: {launching_s * 1e3:.0f} ms")
    whole = f"all passes until every profile is made anew, each {every_s:g} s, for each second"
    for label, each in (
        ("a pass after new steps were told", took_s),
        (whole, second_s),
        ("a pass with nothing new", quiet_s),
    ):
        print(f"{label}: median {statistics.median(each) * 1e3:.1f} ms, most {max(each) * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--passes", type=int, default=10)
    options = parser.parse_args()
    print(
        f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, "
        f"{options.nodes} nodes of {options.devices} devices, {options.jobs} jobs; processor time"
    )
    tune_collector()  # as the daemon does
    asyncio.run(measure(options.nodes, options.devices, options.jobs, options.passes))


if __name__ == "__main__":
    main()
