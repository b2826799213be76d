"""The worker's end of its link to the agent: protos/atoll/v1/worker.proto over ZeroMQ, on a thread of its own."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq
from google.protobuf.message import DecodeError

from atoll.agent.runtime.agent_link.exits import say
from atoll.agent.runtime.agent_link.outbox import Outbox
from atoll.agent.runtime.agent_link.place import AgentEndpoint, WorkerPlace
from atoll.agent.runtime.agent_link.save_progress import progress
from atoll.agent.runtime.agent_link.waiting import batch_wait, waiting
from atoll.errors import BadInput, DeadlineExceeded, PeerLost
from atoll.v1.agents_pb2 import View
from atoll.v1.common_pb2 import LEVEL_WARNING, Plan, StrategyMessage, ViewReport, WorkerId
from atoll.v1.worker_pb2 import (
    Alive,
    Hello,
    OpenPassage,
    Passage,
    Stop,
    SupervisorMessage,
    Welcome,
    WorkerMessage,
)

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
HELLO_EVERY_S: Final = 0.2
WELCOME_DEADLINE_S: Final = 30.0
ALIVE_EVERY_S: Final = 0.5
TELEMETRY_EVERY_S: Final = 1.0
MAX_ASKED: Final = 256
PASSAGE_S: Final = 20.0
_TURN_MS: Final = 100
_FLUSH_MS: Final = 1000  # how long closing waits for last words to leave


class AgentLink:
    """Says Hello until Welcome comes; from then on a thread sends Alive and telemetry and receives plans and stops.

    `close` joins the thread. `on_overdue` is called on that thread when a Stop was not obeyed within half its grace,
    `on_strategy` with what the controller half of the strategy says."""

    def __init__(
        self, place: WorkerPlace, endpoint: AgentEndpoint, welcome_deadline_s: float = WELCOME_DEADLINE_S
    ) -> None:
        """Raises DeadlineExceeded if the agent does not answer, BadInput if its Welcome makes no sense."""
        self.id = WorkerId(job=endpoint.job, run=endpoint.run, rank=endpoint.rank)
        self.outbox = Outbox()
        self.on_overdue: Callable[[Stop], None] | None = None
        self.on_strategy: Callable[[str], None] | None = None
        self.on_view: Callable[[View], None] | None = None
        self.step, self.plan, self.trained = 0, 0, False  # what Alive says
        self._local_batch = 0  # likewise
        self.volunteer_port = 0  # likewise: where this worker takes volunteers' help
        self.obeyed = False  # the training thread is carrying the stop out
        self._world_size = place.world_size
        self._stop: Stop | None = None
        self._standing: ViewReport | None = None
        self._newest_view: View | None = None
        self._overdue_s = math.inf  # monotonic
        self._plans: list[Plan] = []
        self._lock = threading.Lock()
        self._told = threading.Condition()  # a view, a stop or a passage came
        self._asked: deque[str] = deque(maxlen=MAX_ASKED)  # for the strategy's controller half
        self._wanted: deque[OpenPassage] = deque()
        self._passages: dict[tuple[int, int, bool], Passage] = {}
        self._waking, self._woken = socket.socketpair()  # a ZeroMQ socket is its thread's alone
        for end in (self._waking, self._woken):
            end.setblocking(False)
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{endpoint.job}/{endpoint.run}/{endpoint.rank}".encode())
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, _FLUSH_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            self._socket.connect(endpoint.socket)
            self.welcome = self._meet(endpoint, welcome_deadline_s)
        except BaseException:
            self._waking.close()
            self._woken.close()
            self._context.destroy(linger=0)
            raise
        # A daemon: a script that ends without closing its run must not hang here.
        self._thread = threading.Thread(target=self._run, name="atoll-link", daemon=True)
        self._thread.start()

    @property
    def stop(self) -> Stop | None:
        """The agent's wish that this worker stops."""
        return self._stop

    @property
    def makes_views(self) -> bool:
        """Return True if the run continues without a lost worker, in a next view."""
        return self.welcome.launch.plan.view >= 1

    @property
    def joins(self) -> bool:
        """Return True if this worker was launched to join a later view."""
        return self.welcome.launch.HasField("joins")

    @property
    def newest_view(self) -> View | None:
        """The newest that came; None while that is the launch's. Of who joins, at first the one beside which it was
        launched."""
        return self._newest_view

    @property
    def in_force(self) -> int:
        """The newest view of the run that is in force, as far as this worker was told."""
        return self._newest_view.in_force if self._newest_view is not None else 0

    def stand(self, standing: ViewReport) -> None:
        """Report this worker's stage in the views of its run, now and with every Alive."""
        self._standing = standing
        self._wake()

    def trains(self, samples: int) -> int:
        """Report the samples of the passes that begin; 0: the worker trains none. Return those before.

        They are sent at once if they are others: a worker that runs out of memory may be killed before the next
        Alive."""
        before, self._local_batch = self._local_batch, samples
        if samples != before:
            self._wake()
        return before

    def wait_for(self, told: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until a received view or stop makes `told` true. Return False at the deadline."""
        with self._told:
            return self._told.wait_for(told, deadline_s)

    def take_plans(self, view: int = 1) -> list[Plan]:
        """Plans of this view that came since the last call, in the order of their arrival, each checked. Those of older
        ones are dropped, those of newer ones wait."""
        with self._lock:
            plans = [plan for plan in self._plans if _view_of(plan) == view]
            self._plans = [plan for plan in self._plans if _view_of(plan) > view]
        return plans

    def tell_strategy(self, body: str) -> None:
        """Send a message to the controller half of the strategy, or drop it if the agent is gone. From any thread."""
        self._asked.append(body)
        self._wake()

    def passage(self, rank: int, port: int, seal: bool) -> int:
        """A port of this machine that leads to that port at another rank, through the relay. Raises PeerLost."""
        asked = OpenPassage(rank=rank, port=port, seal=seal)
        where = (rank, port, seal)
        self._wanted.append(asked)
        self._wake()
        self.wait_for(lambda: where in self._passages, PASSAGE_S)
        found = self._passages.pop(where, None)
        if found is None or not found.port:
            why = found.trouble if found is not None else f"the agent did not answer within {PASSAGE_S:.0f} s"
            raise PeerLost(f"rank {rank} is behind NAT, and there is no way to it through the relay: {why}")
        return found.port

    def close(self) -> None:
        """Send what is left and join the thread."""
        self._closing.set()
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._waking.close()
            self._woken.close()
            self._context.destroy(linger=_FLUSH_MS)

    def _wake(self) -> None:
        with suppress(OSError):  # woken already, or closed
            self._waking.send(b"!")

    def _meet(self, endpoint: AgentEndpoint, deadline_s: float) -> Welcome:
        hello = WorkerMessage(id=self.id, hello=Hello(pid=os.getpid(), secret=endpoint.secret))
        ends_s = time.monotonic() + deadline_s
        while (now_s := time.monotonic()) < ends_s:
            self._send(hello)
            if self._socket.poll(int(1000 * min(HELLO_EVERY_S, ends_s - now_s)), zmq.POLLIN):
                message = self._receive()
                if message is not None and message.HasField("welcome"):
                    self._check(message.welcome)
                    if message.welcome.launch.HasField("joins"):
                        self._newest_view = message.welcome.launch.joins
                        self._world_size -= 1  # until it is taken in
                    if message.welcome.HasField("view"):
                        self._take_view(message.welcome.view)
                    self._plans.extend(plan for plan in message.welcome.plans if self._acceptable(plan))
                    return message.welcome
                if message is not None:
                    self._take(message)
        raise DeadlineExceeded(
            f"the agent at {endpoint.socket} did not answer within {deadline_s:.0f} s. Is it alive? Look at its log"
        )

    def _run(self) -> None:
        alive_s = telemetry_s = -math.inf
        said: tuple[ViewReport | None, int] = (None, 0)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(_TURN_MS))
            if self._socket in ready:
                message = self._receive()
                if message is not None:
                    self._take(message)
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            while self._asked:
                self._send(WorkerMessage(id=self.id, strategy=StrategyMessage(body=self._asked.popleft())))
            while self._wanted:
                self._send(WorkerMessage(id=self.id, open_passage=self._wanted.popleft()))
            now_s = time.monotonic()
            if now_s - alive_s >= ALIVE_EVERY_S or self._standing is not said[0] or self._local_batch != said[1]:
                alive_s, said = now_s, (self._standing, self._local_batch)
                self._send(self._alive())
            if (late := batch_wait.report(now_s)) is not None:
                say(late)
                self.outbox.notice(LEVEL_WARNING, late)
            if now_s - telemetry_s >= TELEMETRY_EVERY_S or self.outbox.urgent:
                telemetry_s = now_s
                self._send_telemetry()
            if now_s >= self._overdue_s and not self.obeyed and self._stop is not None and self.on_overdue is not None:
                self._overdue_s = math.inf
                self.on_overdue(self._stop)
        self._send(self._alive())
        self._send_telemetry()

    def _alive(self) -> WorkerMessage:
        if self._standing is not None:
            self._standing.handed_bytes = progress.handed_bytes
        alive = Alive(
            step=self.step,
            plan=self.plan,
            local_batch=self._local_batch,
            trained=self.trained,
            saving=progress.saving,
            saved_bytes=progress.own_bytes + progress.peer_bytes,
            view=self._standing,
            volunteer_port=self.volunteer_port,
            waits=bool(waiting),
        )
        return WorkerMessage(id=self.id, alive=alive)

    def _take(self, message: SupervisorMessage) -> None:
        match message.WhichOneof("body"):
            case "plan" if self._acceptable(message.plan):
                with self._lock:
                    self._plans.append(message.plan)
            case "stop" if self._stop is None:
                self._overdue_s = time.monotonic() + max(message.stop.grace_s, 0) / 2
                with self._told:
                    self._stop = message.stop
                    self._told.notify_all()
            case "view":
                self._take_view(message.view)
            case "passage":
                asked = message.passage.asked
                with self._told:
                    self._passages[asked.rank, asked.port, asked.seal] = message.passage
                    self._told.notify_all()
            case "strategy" if self.on_strategy is not None:
                self.on_strategy(message.strategy.body)
            case _:  # a second Welcome or Stop says nothing new
                pass

    def _take_view(self, view: View) -> None:
        """One that is newer, or of the newest another word on what is in force."""
        newest = self._newest_view
        if (view.job, view.run) != (self.id.job, self.id.run) or view.view < (newest.view if newest is not None else 2):
            return
        with self._told:
            self._newest_view = view
            self._told.notify_all()
        if self.on_view is not None and (newest is None or view.view > newest.view):
            self.on_view(view)

    def _acceptable(self, plan: Plan) -> bool:
        if plan.run == self.id.run and plan.id >= 1:
            return True
        text = f"rank {self.id.rank} refused plan {plan.id} of run {plan.run}: it needs run {self.id.run} and an id"
        self.outbox.notice(LEVEL_WARNING, text)
        return False

    def _check(self, welcome: Welcome) -> None:
        launch = welcome.launch
        if launch.id != self.id or launch.world_size != self._world_size:
            raise BadInput(
                f"the agent's Welcome is for {launch.id.job} run {launch.id.run} rank {launch.id.rank} of "
                f"{launch.world_size}; this worker is {self.id.job} run {self.id.run} rank {self.id.rank} of "
                f"{self._world_size}. Was its environment changed?"
            )
        if not 0 < welcome.speed <= 1:
            raise BadInput(f"the agent's Welcome has speed {welcome.speed}; it must be above 0 and at most 1")

    def _receive(self) -> SupervisorMessage | None:
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            return SupervisorMessage.FromString(frames[-1])
        except DecodeError:
            say(f"a message of {len(frames[-1])} bytes from the agent is malformed and was dropped")
            return None

    def _send(self, message: WorkerMessage) -> bool:
        """Returns whether it is on its way."""
        try:
            self._socket.send(message.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            return False  # the agent is away and the queue is full: everything here is repeated or counted
        return True

    def _send_telemetry(self) -> None:
        telemetry = self.outbox.take(self.id)
        if telemetry is not None and not self._send(WorkerMessage(id=self.id, telemetry=telemetry)):
            self.outbox.add(dropped_steps=len(telemetry.steps))


def _view_of(plan: Plan) -> int:
    return plan.view or 1
