"""Telemetry of workers between two messages to the controller: bounded, the oldest dropped and counted."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from atoll.v1.agents_pb2 import Notice, Prepared, Resumed, Telemetry, WorkerTelemetry
from atoll.v1.common_pb2 import Level, LinkSample, Metrics, StepSample
from atoll.worker_key import WorkerKey

MAX_STEPS: Final = 256
MAX_METRICS: Final = 64
MAX_METRIC_VALUES: Final = 64
MAX_METRIC_NAME: Final = 256
MAX_NOTICES: Final = 64
MAX_NOTICE_CHARACTERS: Final = 4096
MAX_LINKS: Final = 64
MAX_PEERS: Final = 4096
MAX_DROP_REASONS: Final = 16
MAX_DROP_REASON: Final = 256
STEP_SECONDS: Final = (
    *("step_s", "compute_s", "wait_s", "stall_s", "load_s", "forward_s", "backward_s", "first_bucket_s", "update_s"),
    *("sync_s", "last_sync_s"),
)
STEP_NORMS: Final = ("local_grad_sqnorm", "global_grad_sqnorm")
STEP_SHARES: Final = ("fresh_share", "rate")
TIERS: Final = ("memory", "disk", "start")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
MESSAGE_BYTES: Final = 1024 * 1024
"""A Telemetry message is closed beyond this, so that none comes near gRPC's limit."""


class _Collected:
    def __init__(self) -> None:
        self.steps: deque[StepSample] = deque(maxlen=MAX_STEPS)
        self.metrics: deque[Metrics] = deque(maxlen=MAX_METRICS)
        self.notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self.links: dict[int, LinkSample] = {}  # by peer; counts since the run began, so the newest is enough
        self.dropped_here = 0
        self.dropped_by_worker = 0
        self.checkpoint_step = 0
        self.memory_step = 0
        self.prepared: Prepared | None = None
        self.resumed: Resumed | None = None
        self.stepped = False
        self.changed = False
        self.forgotten = False


class Collector:
    """What the workers of this node measured, since it was last taken. `begun` is called when a worker's first step
    was heard of, which the controller should know now."""

    def __init__(self, begun: Callable[[], None] = lambda: None) -> None:
        self._begun = begun
        self._workers: dict[WorkerKey, _Collected] = {}

    def add(self, key: WorkerKey, telemetry: WorkerTelemetry) -> None:
        """Take over what a worker sent; more than the protocol allows is cut off."""
        into = self._workers.setdefault(key, _Collected())
        into.changed = True
        sound = [sample for sample in telemetry.steps if _makes_sense(sample)]
        surplus = max(0, len(into.steps) + len(sound) - MAX_STEPS)
        into.dropped_here += surplus + len(telemetry.steps) - len(sound)
        into.steps.extend(sound)
        into.metrics.extend(_cut(metrics) for metrics in telemetry.metrics[-MAX_METRICS:])
        for notice in telemetry.notices[-MAX_NOTICES:]:
            into.notices.append(Notice(level=notice.level, text=notice.text[:MAX_NOTICE_CHARACTERS]))
        for link in telemetry.links[-MAX_LINKS:]:
            if link.peer < MAX_PEERS and 0 <= link.busy_s < math.inf and 0 <= link.goodput_bps < math.inf:
                into.links[link.peer] = _trimmed(link)
        into.dropped_by_worker = max(into.dropped_by_worker, telemetry.dropped_steps)
        into.checkpoint_step = max(into.checkpoint_step, telemetry.checkpoint_step)
        into.memory_step = max(into.memory_step, telemetry.memory_step)
        if telemetry.HasField("prepared"):
            into.prepared = telemetry.prepared
            if not _FINGERPRINT.fullmatch(into.prepared.fingerprint):
                into.prepared.fingerprint = ""
        if telemetry.HasField("resumed") and telemetry.resumed.tier in TIERS:
            into.resumed = telemetry.resumed
        if sound and not into.stepped:
            into.stepped = True
            self._begun()

    def lost(self, telemetry: Telemetry) -> None:
        """What `take` gave could not be sent. Its steps count as dropped."""
        for worker in telemetry.workers:
            key = WorkerKey.of(worker.id)
            if key in self._workers and worker.steps:
                self._workers[key].dropped_here += len(worker.steps)
                self._workers[key].changed = True

    def note(self, key: WorkerKey, level: Level.ValueType, text: str) -> None:
        """Something the agent itself has to say about a worker."""
        into = self._workers.setdefault(key, _Collected())
        into.notices.append(Notice(level=level, text=text[:MAX_NOTICE_CHARACTERS]))
        into.changed = True

    def take(self) -> Iterator[Telemetry]:
        """Everything since the last call, in messages of a bounded size."""
        message, bytes = Telemetry(), 0
        for key, collected in list(self._workers.items()):
            if collected.forgotten:
                del self._workers[key]
            if not collected.changed:
                continue
            worker = _to_wire(key, collected)
            if message.workers and bytes + worker.ByteSize() > MESSAGE_BYTES:
                yield message
                message, bytes = Telemetry(), 0
            message.workers.append(worker)
            bytes += worker.ByteSize()
        if message.workers:
            yield message

    def forget(self, key: WorkerKey) -> None:
        """Its last words are still sent."""
        if key in self._workers:
            self._workers[key].forgotten = True


def _to_wire(key: WorkerKey, collected: _Collected) -> WorkerTelemetry:
    """Also empties what is not cumulative. Of more links than one message takes the others follow with the next."""
    peers = list(collected.links)[:MAX_LINKS]
    worker = WorkerTelemetry(
        id=key.to_wire(),
        steps=collected.steps,
        dropped_steps=collected.dropped_here + collected.dropped_by_worker,
        metrics=collected.metrics,
        notices=collected.notices,
        checkpoint_step=collected.checkpoint_step,
        memory_step=collected.memory_step,
        links=[collected.links.pop(peer) for peer in peers],
        prepared=collected.prepared,
        resumed=collected.resumed,
    )
    collected.steps.clear()
    collected.metrics.clear()
    collected.notices.clear()
    collected.changed = bool(collected.links)
    return worker


def _makes_sense(sample: StepSample) -> bool:
    """Whether the controller takes it. It ends the stream of an agent that sends anything else."""
    amounts = (getattr(sample, name) for name in (*STEP_SECONDS, *STEP_NORMS))
    shares = (getattr(sample, name) for name in STEP_SHARES)
    return all(0 <= amount < math.inf for amount in amounts) and all(0 <= share <= 1 for share in shares)


def _cut(metrics: Metrics) -> Metrics:
    names = [name for name in list(metrics.values)[:MAX_METRIC_VALUES] if len(name) <= MAX_METRIC_NAME]
    return Metrics(step=metrics.step, values={name: metrics.values[name] for name in names})


def _trimmed(link: LinkSample) -> LinkSample:
    reasons = [reason for reason in sorted(link.dropped) if len(reason) <= MAX_DROP_REASON][:MAX_DROP_REASONS]
    return LinkSample(
        peer=link.peer,
        sent_bytes=link.sent_bytes,
        received_bytes=link.received_bytes,
        busy_s=link.busy_s,
        goodput_bps=link.goodput_bps,
        dropped={reason: link.dropped[reason] for reason in reasons},
    )
