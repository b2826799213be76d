"""An agent without workers, over real gRPC: it says what the test wants and remembers what it was told."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable

import grpc.aio

from atoll.agent.incoming import each_worker
from atoll.network.rpc import Tls, open_channel
from atoll.v1 import agents_pb2 as pb
from atoll.v1 import common_pb2
from atoll.v1.agents_pb2_grpc import AgentServiceStub

WAIT_S = 30.0
Key = tuple[str, int, int]


class FakeAgent:
    """Obeys: launched workers run at once, stopped ones drain at once, ended ones are reported until forgotten."""

    def __init__(self, name: str, devices: int = 1, speed: float = 1.0) -> None:
        self.name = name
        self.session = uuid.uuid4().hex
        self.register = pb.Register(
            name=name,
            session=self.session,
            island="here",
            address="127.0.0.1",
            memory_bytes=2**30,
            devices=[common_pb2.Device(index=i, kind="cpu", model="fake", speed=speed) for i in range(devices)],
            rendezvous_ports=[29500, 29501, 29502],
            protocol=1,
            unix_s=time.time(),
            version="0",
        )
        self.workers: dict[Key, common_pb2.WorkerStatus] = {}
        self.launched: list[Key] = []
        self.launches: list[pb.Launch] = []
        self.stopped: list[pb.StopWorkers] = []
        self.forgotten: list[Key] = []
        self.plans: list[pb.PlanForJob] = []
        self.acks: list[pb.LogAck] = []
        self.answers: list[common_pb2.StrategyMessage] = []
        self.registered: pb.Registered | None = None
        self.inventory: pb.Inventory | None = pb.Inventory()
        self.looked: list[pb.TakeInventory] = []
        self.obeys_launch = True
        self.obeys_stop = True
        self.failure: grpc.aio.AioRpcError | None = None
        self.heartbeat_s = 0.2
        self._say: asyncio.Queue[pb.AgentMessage | None] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, address: str, tls: Tls | None = None) -> FakeAgent:
        """Connect and wait for Registered or a refusal, which is kept in `failure`."""
        self.registered, self.failure = None, None
        self._say = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._live(address, tls))]
        await self.until(lambda: self.registered is not None or self.failure is not None)
        return self

    async def disconnect(self) -> None:
        """The stream ends, the workers live on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def until(self, condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(condition)

    async def running(self, job: str, run: int, rank: int = 0) -> None:
        await self.until(lambda: (job, run, rank) in self.workers)

    async def end(
        self, key: Key, kind: int = common_pb2.EXIT_KIND_FINISHED, code: int = 0, reason: str = "", step: int = 0
    ) -> None:
        status = self.workers[key]
        status.state, status.exit_kind = common_pb2.WORKER_STATE_EXITED, kind  # type: ignore[assignment]
        status.exit_code, status.reason, status.step = code, reason, step or status.step
        await self.beat()

    async def train(self, key: Key, steps: range, *, local: int, total: int, compute_s: float, plan: int) -> None:
        self.workers[key].uses_atoll = True
        self.workers[key].step = steps[-1] + 1
        samples = [
            common_pb2.StepSample(
                step=step, local_batch=local, total_batch=total, step_s=0.1, compute_s=compute_s, plan=plan
            )
            for step in steps
        ]
        report = pb.WorkerTelemetry(id=self._id(key), steps=samples)
        await self.send(pb.AgentMessage(telemetry=pb.Telemetry(workers=[report])))
        await self.beat()

    async def tell(self, key: Key, body: str) -> None:
        """The scheduler of a worker's strategy."""
        await self.send(pb.AgentMessage(strategy=common_pb2.StrategyMessage(id=self._id(key), body=body)))

    async def log(self, key: Key, offset: int, data: bytes) -> None:
        before = len(self.acks)
        await self.send(pb.AgentMessage(log=pb.LogBatch(id=self._id(key), offset=offset, data=data)))
        await self.until(lambda: len(self.acks) > before)

    async def send(self, message: pb.AgentMessage) -> None:
        await self._say.put(message)

    async def beat(self) -> None:
        beat = pb.Heartbeat(workers=self.workers.values(), rendezvous_ports=self.register.rendezvous_ports)
        await self.send(pb.AgentMessage(heartbeat=beat))

    def _id(self, key: Key) -> common_pb2.WorkerId:
        return common_pb2.WorkerId(job=key[0], run=key[1], rank=key[2])

    async def _live(self, address: str, tls: Tls | None) -> None:
        self.register.ClearField("workers")
        self.register.workers.extend(self.workers.values())
        async with open_channel(address, tls) as channel, asyncio.TaskGroup() as group:
            call = AgentServiceStub(channel).Connect(self._messages())
            beating = group.create_task(self._beat_on())
            try:
                async for message in call:
                    async with self._changed:
                        await self._take(message)
                        self._changed.notify_all()
            except grpc.aio.AioRpcError as error:
                async with self._changed:
                    self.failure = error
                    self._changed.notify_all()
            finally:
                beating.cancel()

    async def _messages(self) -> AsyncIterator[pb.AgentMessage]:
        yield pb.AgentMessage(register=self.register)
        while (message := await self._say.get()) is not None:
            yield message

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            await self.beat()

    async def _take(self, message: pb.ControllerMessage) -> None:
        match message.WhichOneof("body"):
            case "registered":
                self.registered = message.registered
            case "launch":
                for launch in each_worker(message.launch):
                    self._launch(launch)
                await self.beat()
            case "stop":
                self.stopped.append(message.stop)
                if self.obeys_stop:
                    self._drain(message.stop)
                    await self.beat()
            case "forget":
                key = _key(message.forget.id)
                self.forgotten.append(key)
                self.workers.pop(key, None)
            case "plan":
                self.plans.append(message.plan)
            case "take_inventory":
                self.looked.append(message.take_inventory)
                if self.inventory is not None:
                    self.inventory.request = message.take_inventory.request
                    await self.send(pb.AgentMessage(inventory=self.inventory))
            case "strategy":
                self.answers.append(message.strategy)
            case "log_ack":
                self.acks.append(message.log_ack)

    def _launch(self, launch: pb.Launch) -> None:
        key = _key(launch.id)
        self.launched.append(key)
        self.launches.append(launch)
        if self.obeys_launch and key not in self.workers:
            self.workers[key] = common_pb2.WorkerStatus(id=launch.id, state=common_pb2.WORKER_STATE_RUNNING, pid=1)

    def _drain(self, stop: pb.StopWorkers) -> None:
        for (job, run, _), status in self.workers.items():
            if job == stop.job and run <= stop.run and status.state != common_pb2.WORKER_STATE_EXITED:
                status.state = common_pb2.WORKER_STATE_EXITED
                status.exit_kind, status.exit_code = common_pb2.EXIT_KIND_DRAINED, 85


def _key(worker: common_pb2.WorkerId) -> Key:
    return worker.job, worker.run, worker.rank
