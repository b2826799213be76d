"""One pass of the reconciler over a large cluster: processor time of this process, median and most of the passes.

    python benchmarks/reconciler_pass.py [--nodes 1000] [--devices 8] [--jobs 100]

The real reconciler, ledger, sessions and estimators, with agents that obey at once and a store in memory. Each job has
the same part of all devices, and all train: passes are one telemetry interval apart, so each makes profiles anew, of as
many ranks as a pass takes on.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import random
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from atoll.agent.incoming import each_worker
from atoll.agent.telemetry.collect import Collector
from atoll.controller.jobs.agents.progress import ProgressBoard
from atoll.controller.jobs.agents.sessions import AgentSession, AgentSessions
from atoll.controller.jobs.lifecycle.observed import NewEvent
from atoll.controller.jobs.lifecycle.reconciler import Reconciler
from atoll.controller.jobs.records.ledger import Ledger
from atoll.controller.state.records import DeviceRecord, JobPhase, JobRecord, Level, NodeRecord
from atoll.controller.state.store import (
    Change,
    Condition,
    Delete,
    DeletePrefix,
    Entry,
    Fence,
    Put,
    StateStore,
    StoreSnapshot,
    WatchBatch,
)
from atoll.jobspec import Spec
from atoll.v1 import agents_pb2, common_pb2
from atoll.worker_key import WorkerKey

TELEMETRY_S: Final = 1.0
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

    async def read_prefix(self, prefix: str, limit: int | None = None, *, keys_only: bool = False) -> StoreSnapshot:
        found = sorted(key for key in self._entries if key.startswith(prefix))[:limit]
        return StoreSnapshot(self._revision, {key: self._entries[key] for key in found})

    async def commit(
        self, changes: Sequence[Change], conditions: Sequence[Condition] = (), fence: Fence | None = None
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


class Cluster:
    """Nodes whose agents start what they are told to start, on a clock of their own."""

    def __init__(self, nodes: int, devices: int, seed: int = 0) -> None:
        self.now_s = 1000.0
        self._random = random.Random(seed)
        self.workers: dict[str, dict[tuple[str, int, int], common_pb2.WorkerStatus]] = {}
        self._step = 0
        self._collector = Collector()
        for number in range(VARIANTS):
            self._collector.estimate(WorkerKey("variant", 1, number + 1))
        store = MemoryStore()
        self.ledger = Ledger(store, Fence("/atoll/leader", 1), lambda: None, lambda: self.now_s)
        self.sessions = AgentSessions(3.0, lambda: None, lambda: self.now_s)
        self.progress = ProgressBoard(lambda: self.now_s)
        self.reconciler = Reconciler(
            self.ledger, self.sessions, self.progress, node_lease_s=3.0, reveal=True, clock=lambda: self.now_s
        )
        for index in range(nodes):
            record = node_record(f"node-{index:04d}", devices)
            self.sessions.admit(AgentSession(record.name, record, 1, self.now_s))
            self.workers[record.name] = {}

    async def submit(self, jobs: int, workers: int) -> None:
        for number in range(jobs):
            spec = Spec(
                name=f"job-{number:03d}", script="train.py", code_sha256="0" * 64, min_workers=workers,
                max_workers=workers,
            )  # fmt: skip
            id = f"{spec.name}-0001"
            event = NewEvent(Level.INFO, "phase", "submitted")
            async with self.ledger.writing:
                await self.ledger.add(JobRecord(id=id, spec=spec, request_id=id), event)

    def report(self) -> None:
        """All agents beat, and tell what they made of the steps of the last interval."""
        told = [self._variant(number) for number in range(VARIANTS)]
        self._step += STEPS_TOLD
        for name, session in self.sessions.connected.items():
            session.heard_s = self.now_s
            session.report(self.workers[name].values(), [29500])
            for number, ((job, run, rank), status) in enumerate(self.workers[name].items()):
                status.step = status.view.step = self._step
                telemetry = agents_pb2.WorkerTelemetry(id=common_pb2.WorkerId(job=job, run=run, rank=rank))
                telemetry.MergeFrom(told[(number + rank) % VARIANTS])
                self.progress.observe(telemetry)

    def _variant(self, number: int) -> agents_pb2.WorkerTelemetry:
        """What one of VARIANTS unequal workers tells; making 8,000 of them would take longer than what is measured."""
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

    async def obey(self) -> None:
        for name, session in self.sessions.connected.items():
            while session.waiting:
                told = await session.next_message()
                message = agents_pb2.ControllerMessage.FromString(told) if isinstance(told, bytes) else told
                if message is not None and message.WhichOneof("body") == "launch":
                    for launch in each_worker(message.launch):
                        id = launch.id
                        self.workers[name][id.job, id.run, id.rank] = common_pb2.WorkerStatus(
                            id=id, state=common_pb2.WORKER_STATE_RUNNING, pid=1, uses_atoll=True, view=TRAINING
                        )

    async def pass_s(self) -> float:
        """Processor time of one pass, in seconds."""
        began_s = time.process_time()
        await self.reconciler.once()
        return time.process_time() - began_s

    def phases(self) -> set[JobPhase]:
        return {state.job.status.phase for state in self.ledger.jobs.values()}


def node_record(name: str, devices: int) -> NodeRecord:
    device = DeviceRecord(index=0, kind="cpu", model="simulated", memory_bytes=2**34, speed=1.0)
    return NodeRecord(
        name=name,
        island="default",
        address="127.0.0.1",
        memory_bytes=2**35,
        devices=tuple(
            DeviceRecord(index=i, kind="cpu", model=device.model, memory_bytes=device.memory_bytes, speed=1.0)
            for i in range(devices)
        ),
        version="0",
    )


async def measure(nodes: int, devices: int, jobs: int, passes: int) -> None:
    cluster = Cluster(nodes, devices)
    await cluster.submit(jobs, nodes * devices // jobs)
    began_s, launching_s = time.monotonic(), 0.0
    while cluster.phases() != {JobPhase.RUNNING}:
        if time.monotonic() - began_s > 120:
            raise TimeoutError(f"the jobs do not all train: {cluster.phases()}")
        cluster.now_s += 0.5
        cluster.report()
        launching_s = max(launching_s, await cluster.pass_s())
        await cluster.obey()
    took_s = []
    for number in range(passes + 3):
        cluster.now_s += TELEMETRY_S
        cluster.report()
        took = await cluster.pass_s()
        await cluster.obey()
        if number >= 3:  # enough steps for a profile
            took_s.append(took)
    quiet_s = []
    for _ in range(passes):
        cluster.now_s += 0.05
        quiet_s.append(await cluster.pass_s())
    print(f"longest pass while {jobs} jobs of {nodes * devices // jobs} workers start: {launching_s * 1e3:.0f} ms")
    for label, each in (("after new steps were told", took_s), ("with nothing new", quiet_s)):
        print(f"a pass {label}: median {statistics.median(each) * 1e3:.1f} ms, most {max(each) * 1e3:.1f} ms")


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
    asyncio.run(measure(options.nodes, options.devices, options.jobs, options.passes))


if __name__ == "__main__":
    main()
