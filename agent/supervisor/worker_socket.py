"""Agent's end of worker.proto: a ZeroMQ ROUTER on a Unix socket for its workers."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError

from atoll.agent.telemetry.collect import Collector
from atoll.jobs.worker_key import WorkerKey
from atoll.network.rpc import MAX_MESSAGE_BYTES
from atoll.strategies.declaration import MAX_JSON_BYTES
from atoll.v1.agents_pb2 import PlanForJob, View
from atoll.v1.common_pb2 import LEVEL_WARNING, Plan, StrategyMessage
from atoll.v1.worker_pb2 import Alive, OpenPassage, Passage, Stop, SupervisorMessage, Welcome, WorkerMessage

logger = logging.getLogger(__name__)

_HWM: Final = 1000  # messages, per worker and direction
_PATH_CHARACTERS: Final = 90  # the kernel takes 107 bytes; workers of other user ids may see another prefix
_KEPT_PLANS: Final = 256


@dataclass(slots=True)
class _Expected:
    """A worker that was started, from before its Hello until it is released."""

    secret: str
    welcome: Welcome
    greeted: bool = False
    stop: Stop | None = None
    dropped: Counter[str] = field(default_factory=Counter)


MAX_WAITING: Final = 1024
"""Length of the queue; the oldest are dropped first, since a scheduler needs only the newest state."""


class StrategyMessages:
    """Queue of strategies' messages from this node's workers to the controller, on the event loop. Cleared while the
    controller is away."""

    def __init__(self) -> None:
        self._waiting: deque[StrategyMessage] = deque(maxlen=MAX_WAITING)
        self._filled = asyncio.Event()

    def put(self, message: StrategyMessage) -> None:
        self._waiting.append(message)
        self._filled.set()

    def clear(self) -> None:
        """Drop all messages: the controller is away."""
        self._waiting.clear()

    async def next(self) -> StrategyMessage:
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        return self._waiting.popleft()


class WorkerSocket:
    """Socket of all workers, identified by their secrets. Callbacks run on the event loop."""

    def __init__(
        self,
        state_dir: Path,
        collector: Collector,
        on_hello: Callable[[WorkerKey], None],
        on_alive: Callable[[WorkerKey, Alive], None],
        on_strategy: Callable[[StrategyMessage], None],
        *,
        on_passage: Callable[[WorkerKey, OpenPassage], Passage],
    ) -> None:
        """Raises OSError, zmq.ZMQError if the socket cannot be made."""
        self._collector = collector
        self._on_hello = on_hello
        self._on_alive = on_alive
        self._on_strategy = on_strategy
        self._on_passage = on_passage
        self._workers: dict[WorkerKey, _Expected] = {}
        self._outgoing: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(_HWM)
        self.dropped: Counter[str] = Counter()
        """Number of rejected messages by reason."""
        self._folder: Path | None = None
        self._path = state_dir / "agent.sock"
        if len(os.fsencode(self._path)) > _PATH_CHARACTERS:
            self._folder = Path(tempfile.mkdtemp(prefix="atoll-"))  # private to this user, as state_dir is
            self._path = self._folder / "agent.sock"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, _HWM)
        self._socket.setsockopt(zmq.SNDHWM, _HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._path.unlink(missing_ok=True)
        self._socket.bind(self.endpoint)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self._path}"

    def expect(self, key: WorkerKey, secret: str, welcome: Welcome) -> None:
        """Accept a worker with this secret, which is about to start."""
        self._workers[key] = _Expected(secret, welcome)

    def release(self, key: WorkerKey) -> None:
        """Drop all further messages in the name of this worker: it has ended."""
        self._workers.pop(key, None)

    def welcome_of(self, key: WorkerKey) -> Welcome | None:
        """Return the Welcome of a worker that is not released, with the newest view."""
        worker = self._workers.get(key)
        return worker.welcome if worker is not None else None

    def send_stop(self, key: WorkerKey, grace_s: float, reason: str) -> None:
        worker = self._workers.get(key)
        if worker is not None:
            worker.stop = Stop(grace_s=grace_s, reason=reason)
            if worker.greeted:
                self._post(key, SupervisorMessage(stop=worker.stop))

    def send_plan(self, message: PlanForJob) -> None:
        """Send a plan to every worker of its run, in Welcome before its Hello. Repeats are dropped."""
        for key, worker in self._workers.items():
            if (key.job, key.run) != (message.job, message.plan.run) or not _is_newer(message.plan, worker.welcome):
                continue
            worker.welcome.plans.append(message.plan)
            del worker.welcome.plans[:-_KEPT_PLANS]
            if worker.greeted:
                self._post(key, SupervisorMessage(plan=message.plan))

    def send_view(self, view: View) -> None:
        """Send a view to every worker of its run, in Welcome before its Hello. Repeats are dropped."""
        for key, worker in self._workers.items():
            known = worker.welcome.view
            if (key.job, key.run) != (view.job, view.run) or (view.view, view.in_force) <= (known.view, known.in_force):
                continue
            worker.welcome.view.CopyFrom(view)
            if worker.greeted:
                self._post(key, SupervisorMessage(view=view))

    def send_strategy(self, key: WorkerKey, message: StrategyMessage) -> None:
        """Send a strategy's message to this worker, unless it is of another run or has not sent Hello."""
        worker = self._workers.get(key)
        if worker is not None and worker.greeted:
            self._post(key, SupervisorMessage(strategy=message))

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(), name="worker socket: receive")
            group.create_task(self._send(), name="worker socket: send")

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._path.unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.rmdir()

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 2:
                self._drop("not two frames")
                continue
            try:
                self._take(frames[0], WorkerMessage.FromString(frames[1]))
            except DecodeError:
                self._drop("malformed")

    async def _send(self) -> None:
        while True:
            await self._socket.send_multipart(await self._outgoing.get())

    def _post(self, key: WorkerKey, message: SupervisorMessage) -> None:
        try:
            self._outgoing.put_nowait((_identity(key), message.SerializeToString()))
        except asyncio.QueueFull:
            self._drop("outgoing queue full")

    def _take(self, identity: bytes, message: WorkerMessage) -> None:
        key = WorkerKey.of(message.id)
        worker = self._workers.get(key)
        if identity != _identity(key):
            self._drop("identity is not the id")
        elif worker is None:
            self._drop("no such worker")
        elif message.HasField("hello"):
            self._greet(key, worker, message.hello.secret)
        elif not worker.greeted:
            self._drop("no hello before", key)
        elif message.HasField("alive"):
            self._on_alive(key, message.alive)
        elif message.HasField("telemetry"):
            self._collector.add(key, message.telemetry)
        elif message.HasField("strategy"):
            if len(message.strategy.body) > MAX_JSON_BYTES:
                self._drop("strategy message too large", key)
            else:
                self._on_strategy(StrategyMessage(id=message.id, body=message.strategy.body))
        elif message.HasField("open_passage"):
            self._post(key, SupervisorMessage(passage=self._on_passage(key, message.open_passage)))
        else:
            self._drop("empty", key)

    def _greet(self, key: WorkerKey, worker: _Expected, secret: str) -> None:
        if not hmac.compare_digest(secret.encode(), worker.secret.encode()):
            self._drop("wrong secret", key)
            return
        worker.greeted = True
        self._post(key, SupervisorMessage(welcome=worker.welcome))
        if worker.stop is not None:
            self._post(key, SupervisorMessage(stop=worker.stop))
        self._on_hello(key)

    def _drop(self, why: str, key: WorkerKey | None = None) -> None:
        """Count a rejected message, and log the first of each cause."""
        self.dropped[why] += 1
        if self.dropped[why] == 1:
            logger.warning("a message on the workers' socket was dropped (%s)%s", why, f", as of {key}" if key else "")
        worker = self._workers.get(key) if key else None
        if key is not None and worker is not None:
            worker.dropped[why] += 1
            if worker.dropped[why] == 1:
                self._collector.note(key, LEVEL_WARNING, f"a message in the name of rank {key.rank} was dropped: {why}")


def _identity(key: WorkerKey) -> bytes:
    return f"{key.job}/{key.run}/{key.rank}".encode()


def _is_newer(plan: Plan, welcome: Welcome) -> bool:
    newest = welcome.plans[-1].id if welcome.plans else welcome.launch.plan.id
    return plan.id > newest
