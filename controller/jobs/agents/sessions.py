"""The agents that are or were connected: the last report of each, and the messages on their way to it.

All on one event loop. A heartbeat changes memory only; a node is written to etcd when it joins and removed when it is
lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final, TypeAlias

from atoll.controller.jobs.agents.reported import NewPoints
from atoll.controller.jobs.model.observed import PARTED_S, WORKER_DEATH_S, ObservedNode, ObservedWorker
from atoll.controller.jobs.model.supply import MeasuredEdges
from atoll.controller.jobs.records.wire import worker_from_wire
from atoll.controller.state.records import DeviceRecord, NodeRecord
from atoll.errors import AtollError, Conflict, ControllerUnreachable
from atoll.jobs.worker_key import WorkerKey
from atoll.v1 import agents_pb2, common_pb2

OUTBOX_MESSAGES: Final = 4096
OUTPUT_BATCHES: Final = 64
"""Waiting batches of output: as many as a node has workers, each with one message in flight."""
RESEND_S: Final = 3.0
"""An instruction that was sent over this stream and is not yet obeyed is sent again after this long."""
GONE_NODES: Final = 256
"""Lost nodes that are remembered, for those who list them."""
PULSE_S: Final = 0.1
PAUSE_S: Final = 0.5
"""Readings of the clock further apart than this mean that this controller was paused and received nothing."""

Outgoing: TypeAlias = agents_pb2.ControllerMessage | bytes
"""A message for an agent; serialised already where many are sent the same."""
Queued: TypeAlias = Outgoing | Callable[[], Outgoing]
"""Made when it is sent: a thousand launches that wait take no more memory than one."""

Output: TypeAlias = agents_pb2.LogBatch | tuple[common_pb2.WorkerId, NewPoints]
"""A worker's printed output, or reported metrics with it and its peers."""


class NameTaken(Conflict):
    """Two agents with one name."""


class DeviceTaken(Conflict):
    """Two agents with one GPU, without an agreement to share it."""


class AgentSession:
    """One agent's stream. `ended` is set with `why` when the controller wants it closed."""

    def __init__(self, session: str, record: NodeRecord, now_s: float) -> None:
        self.id: Final = session
        self.record = record
        self.devices: Final = frozenset(device.index for device in record.devices)
        self.began_s: Final = now_s
        self.last_message_s = now_s
        self.links_port, self.links_secret = 0, b""
        """Port at which other agents measure links to this one, and the secret from which their keys are derived."""
        self.ports: tuple[int, ...] = ()
        self.workers: dict[WorkerKey, ObservedWorker] = {}
        self.changes = 0
        """Reports in which a worker came, went or changed its state."""
        self.ranks: dict[tuple[str, int], frozenset[int]] = {}
        """Of its workers, by job and run."""
        self.statuses: dict[WorkerKey, common_pb2.WorkerStatus] = {}
        self.memory_jobs: frozenset[str] = frozenset()
        self.samples: tuple[common_pb2.DeviceSample, ...] = ()
        self.edges: dict[WorkerKey, MeasuredEdges] = {}
        """Of a volunteer, by helper: to the ranks that it could help."""
        self.output: asyncio.Queue[Output] = asyncio.Queue(OUTPUT_BATCHES)
        """Of its workers, not written down yet."""
        self.ended = asyncio.Event()
        self.why: AtollError | None = None
        self.plans_sent: dict[tuple[str, int], int] = {}
        self.views_sent: dict[tuple[str, int], tuple[int, int]] = {}
        self._outbox: deque[Queued] = deque()
        self._filled = asyncio.Event()
        self._sent_s: dict[object, float] = {}
        self._questions = 0
        self._asked: dict[int, asyncio.Future[agents_pb2.Inventory]] = {}

    def end(self, why: AtollError) -> None:
        """Have the stream closed; the first reason counts."""
        self.why = self.why or why
        self.ended.set()
        self._filled.set()

    def send(self, message: Queued) -> None:
        """Queue a message. End the stream of an agent that takes none: it connects again and gets them anew."""
        if len(self._outbox) >= OUTBOX_MESSAGES:
            self.end(ControllerUnreachable(f"{OUTBOX_MESSAGES} messages wait for {self.record.name}; connect again"))
            return
        self._outbox.append(message)
        self._filled.set()

    @property
    def waiting(self) -> int:
        """Messages that the agent has not been sent yet."""
        return len(self._outbox)

    def send_unless_recent(self, topic: object, message: Callable[[], Outgoing], now_s: float) -> None:
        """Send what may be repeated, but not more often than every RESEND_S."""
        if now_s - self._sent_s.get(topic, -RESEND_S) < RESEND_S:
            return
        if len(self._sent_s) > OUTBOX_MESSAGES:
            self._sent_s = {t: at for t, at in self._sent_s.items() if now_s - at < RESEND_S}
        self._sent_s[topic] = now_s
        self.send(message)

    def take_inventory(
        self, job: str, directory: str, *, store: bool, remove: bool = False, keep_checkpoints: bool = False
    ) -> asyncio.Future[agents_pb2.Inventory]:
        """Ask for a job's checkpoints on this node, or for what is left of them once they and its output were removed.
        The caller cancels the future when it no longer waits."""
        number = self._questions = self._questions + 1
        answer: asyncio.Future[agents_pb2.Inventory] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        message = agents_pb2.TakeInventory(
            request=number,
            job=job,
            directory=directory,
            store=store,
            remove=remove,
            keep_checkpoints=keep_checkpoints,
        )
        self.send(agents_pb2.ControllerMessage(take_inventory=message))
        return answer

    def inventory_taken(self, inventory: agents_pb2.Inventory) -> None:
        """Set the answer to `take_inventory`, unless its caller no longer waits."""
        answer = self._asked.get(inventory.request)
        if answer is not None and not answer.done():
            answer.set_result(inventory)

    async def next_message(self) -> Outgoing | None:
        """Return the next message for the agent; None when the stream is to be closed."""
        while not self._outbox:
            if self.ended.is_set():
                return None
            self._filled.clear()
            await self._filled.wait()
        if self.ended.is_set():
            return None
        message = self._outbox.popleft()
        return message() if callable(message) else message

    def report(
        self, statuses: Iterable[common_pb2.WorkerStatus], ports: Iterable[int], memory_jobs: Iterable[str] = ()
    ) -> bool:
        """Take over an agent's report. Return True if a worker came, went or changed its state."""
        self.memory_jobs = frozenset() if self.record.volunteer else frozenset(memory_jobs)
        workers: dict[WorkerKey, ObservedWorker] = {}
        raw: dict[WorkerKey, common_pb2.WorkerStatus] = {}
        offered = tuple(ports)
        changed = offered != self.ports
        for status in statuses:
            key = WorkerKey.of(status.id)
            worker = worker_from_wire(status)
            before = self.workers.get(key)
            changed = changed or before is None or _calls_for_a_pass(before, worker)
            workers[key], raw[key] = worker, status
        if workers.keys() != self.workers.keys():
            self.ranks = _by_run(workers)
            changed = True
        self.workers, self.statuses, self.ports = workers, raw, offered
        self.changes += changed
        return changed

    def measured(self, telemetry: agents_pb2.WorkerTelemetry) -> None:
        """Record a volunteer's measurements: how far its helper is from the ranks that it could help."""
        edges = {link.peer: link.busy_s for link in telemetry.links if link.busy_s > 0}
        key = WorkerKey.of(telemetry.id)
        if self.record.volunteer and edges and key in self.workers:
            self.edges = {one: kept for one, kept in self.edges.items() if one in self.workers}
            self.edges[key] = self.edges.get(key, MeasuredEdges()).again(edges)

    def sampled(self, samples: Iterable[common_pb2.DeviceSample]) -> None:
        """Keep the newest samples of the node's devices."""
        self.samples = tuple(sample for sample in samples if sample.index in self.devices) or self.samples


def _by_run(workers: Iterable[WorkerKey]) -> dict[tuple[str, int], frozenset[int]]:
    found: dict[tuple[str, int], set[int]] = {}
    for job, run, rank in workers:
        found.setdefault((job, run), set()).add(rank)
    return {key: frozenset(ranks) for key, ranks in found.items()}


def _calls_for_a_pass(before: ObservedWorker, now: ObservedWorker) -> bool:
    """Return True if more than the step changed of a worker."""
    if before.phase is not now.phase or before.uses_atoll != now.uses_atoll:
        return True
    old, new = before.view_report, now.view_report
    if old is None or new is None:
        return old is not new
    begun = (old.way.first_step_s > 0) != (new.way.first_step_s > 0)
    return begun or old.view != new.view or old.stage is not new.stage


def _observe(session: AgentSession) -> ObservedNode:
    return ObservedNode(
        session.record, True, session.last_message_s, session.workers, session.ports, session.memory_jobs
    )


class AgentSessions:
    """All agents by node name. `changed` is called when something happened that calls for a pass of the reconciler."""

    def __init__(
        self, node_lease_s: float, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node_lease_s = node_lease_s
        self._changed = changed
        self._clock = clock
        self._clock_read_s = clock()
        self._due_s = (PARTED_S, node_lease_s, node_lease_s + WORKER_DEATH_S)  # silences after which something is due
        self.connected: dict[str, AgentSession] = {}
        self.gone: dict[str, AgentSession] = {}
        self.remembered: dict[str, NodeRecord] = {}
        """Nodes that an earlier leader knew and that have not come back yet."""
        self.awaiting_since_s = self._clock_read_s
        """Since when those may come back, less what this controller slept through."""

    @property
    def volunteers(self) -> dict[str, AgentSession]:
        """Return the connected nodes that are never ranks of a run."""
        return {name: session for name, session in self.connected.items() if session.record.volunteer}

    @property
    def reliable(self) -> dict[str, AgentSession]:
        """The others."""
        return {name: session for name, session in self.connected.items() if not session.record.volunteer}

    def remember(self, nodes: dict[str, NodeRecord]) -> None:
        """Wait for the nodes that an earlier leader knew, from now on."""
        self.remembered, self.awaiting_since_s = nodes, self._read_clock()

    def check(self, session_id: str, node: NodeRecord) -> None:
        """Raises NameTaken where a live agent has this name already, DeviceTaken where one has a GPU
        that both do not agree to share."""
        now_s = self._read_clock()
        other = self.connected.get(node.name)
        if other is not None and other.id != session_id and now_s - other.last_message_s <= self._node_lease_s:
            raise NameTaken(
                f"another agent named {node.name!r} is connected, from {other.record.address}. "
                "Give this one another --name, or stop the other"
            )
        if not any(device.uuid for device in node.devices):
            return
        others = {
            name: other.record
            for name, other in self.connected.items()
            if name != node.name and now_s - other.last_message_s <= self._node_lease_s
        }
        if why := gpu_refusal(node, others):
            raise DeviceTaken(why)

    def admit(self, session: AgentSession) -> None:
        """Take over the name from a stream of the same agent, or from one that went silent. Raises NameTaken,
        DeviceTaken."""
        name = session.record.name
        self.check(session.id, session.record)
        if other := self.connected.get(name):
            other.end(ControllerUnreachable(f"{name!r} connected again"))
        self.connected[name] = session
        self.gone.pop(name, None)
        self.remembered.pop(name, None)
        self._changed()

    def send(self, node: str, message: agents_pb2.ControllerMessage) -> None:
        """Send to this node's agent; dropped if it is not connected."""
        if session := self.connected.get(node):
            session.send(message)

    def leave(self, session: AgentSession) -> None:
        """The stream is over. Its last report is kept."""
        name = session.record.name
        if self.connected.get(name) is session:
            del self.connected[name]
            self.gone[name] = session
            self._changed()

    def forget_lost(self, awaited: Container[str]) -> None:
        """Keep the newest GONE_NODES of the lost nodes, and all that are `awaited` or whose lease has not ended."""
        now_s, dead_s = self._read_clock(), self._node_lease_s + WORKER_DEATH_S
        lost = [name for name, s in self.gone.items() if now_s - s.last_message_s > dead_s and name not in awaited]
        lost.sort(key=lambda name: self.gone[name].last_message_s, reverse=True)
        for name in lost[GONE_NODES:]:
            del self.gone[name]

    async def watch(self) -> None:
        """Read the clock until cancelled, and have the reconciler make a pass when a lease runs out."""
        while True:
            before_s = self._read_clock()
            await asyncio.sleep(PULSE_S)
            now_s = self._read_clock()
            last_s = [session.last_message_s for session in (*self.connected.values(), *self.gone.values())]
            if any(before_s < message_s + due_s <= now_s for message_s in last_s for due_s in self._due_s):
                self._changed()

    def end_silent(self) -> None:
        """Close streams over which no message came for a lease: TCP alone notices much later."""
        now_s = self._read_clock()
        for session in list(self.connected.values()):
            if now_s - session.last_message_s > self._node_lease_s:
                silent_s = now_s - session.last_message_s
                session.end(ControllerUnreachable(f"no message came for {silent_s:.1f} s; connect again"))
                self.leave(session)  # now, not when its stream has been closed: that may need the other side

    def _read_clock(self) -> float:
        """Return the time. A pause of this controller counts against no agent, which may have sent all the while."""
        now_s = self._clock()
        paused_s = now_s - self._clock_read_s
        self._clock_read_s = now_s
        if paused_s > PAUSE_S:
            for session in (*self.connected.values(), *self.gone.values()):
                session.last_message_s = min(now_s, session.last_message_s + paused_s)
            self.awaiting_since_s = min(now_s, self.awaiting_since_s + paused_s)
        return now_s

    def end_all(self, why: AtollError) -> None:
        for session in list(self.connected.values()):
            session.end(why)

    def records(self) -> dict[str, NodeRecord]:
        """Return the records of connected nodes."""
        return {name: session.record for name, session in self.connected.items()}

    def nodes(self) -> dict[str, ObservedNode]:
        """Return every node that is or was connected, as the decisions see it."""
        return self.nodes_named({*self.remembered, *self.gone, *self.connected})

    def nodes_named(self, names: Iterable[str]) -> dict[str, ObservedNode]:
        """Return those of the named nodes that are or were connected."""
        found = {}
        for name in names:
            if session := self.connected.get(name):
                found[name] = _observe(session)
            elif session := self.gone.get(name):
                found[name] = ObservedNode(session.record, False, session.last_message_s)
            elif record := self.remembered.get(name):
                found[name] = ObservedNode(record, False, None)
        return found

    def status(self, node: str, key: WorkerKey) -> common_pb2.WorkerStatus | None:
        session = self.connected.get(node)
        return session.statuses.get(key) if session else None


def gpu_refusal(node: NodeRecord, others: Mapping[str, NodeRecord]) -> str:
    """Return why an agent may not join beside `others`, the other live agents by name; empty where it may."""
    for device in node.devices:
        holders = {
            name: held
            for name, other in others.items()
            for held in other.devices
            if device.uuid and held.uuid == device.uuid
        }
        if holders and (why := _disagreement(device, holders)):
            name, held = next(iter(holders.items()))
            return (
                f"GPU {device.index} of {node.name!r} ({device.model}, {device.uuid}) is GPU {held.index} of the agent "
                f"{name!r}, from {others[name].address}{why}"
            )
    return ""


def _disagreement(device: DeviceRecord, holders: Mapping[str, DeviceRecord]) -> str:
    """Return how the sentence ends that refuses `device` beside those who have it; empty where they agree."""
    number, theirs = max(1, device.sharers), {max(1, held.sharers) for held in holders.values()}
    agreed = max(theirs)
    if theirs == {number} and number > len(holders):
        return ""
    if number == agreed == 1:
        return (
            ": two jobs would share it. Stop one of both, leave each its own GPUs with CUDA_VISIBLE_DEVICES, or start "
            "both with --share-gpu 2"
        )
    if agreed == 1:
        return f", which has it for itself. Start that agent with --share-gpu {number} too, or stop it"
    if number == agreed:
        return (
            f"; {agreed} agents may share it, and {', '.join(sorted(holders))} do. Stop one of them, or start all "
            f"with --share-gpu {agreed + 1}"
        )
    return (
        f", which shares it as one of {agreed} agents. Give this agent --share-gpu {agreed}, or leave it its own GPUs "
        "with CUDA_VISIBLE_DEVICES"
    )
