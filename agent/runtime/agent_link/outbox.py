"""Collects a worker's telemetry until the link's next turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from atoll.agent.telemetry.buffer import TelemetryBuffer
from atoll.v1.agents_pb2 import Prepared, Resumed, WorkerTelemetry
from atoll.v1.common_pb2 import Level, LinkSample, Metrics, StepSample, WorkerId


class Outbox:
    """Filled by the training thread, emptied by the link's. No call waits."""

    links_so_far: Callable[[], Iterable[LinkSample]] | None = None
    """Traffic of this view's links to peers so far. The link's thread calls it for every report, since a training
    thread that waits for a link reports nothing. The newest sample of each peer is sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = TelemetryBuffer()
        self._view = 1
        self._earlier: deque[WorkerTelemetry] = deque()  # of earlier views
        self.urgent = False
        """The first step was done: a recovery ends with it."""

    def step(self, sample: StepSample) -> None:
        with self._lock:
            self.urgent = self.urgent or not self._buffer.stepped
            self._buffer.step(sample)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._buffer.metrics(Metrics(step=step, values=values))

    def notice(self, level: Level.ValueType, text: str) -> None:
        with self._lock:
            self._buffer.notice(level, text)

    def resumed(self, tier: str, step: int) -> None:
        """Training begins at `step`, from a checkpoint in "memory" or on "disk", or from the "start"."""
        with self._lock:
            self._buffer.resumed(Resumed(tier=tier, step=step))

    def prepared(self, what: Prepared) -> None:
        with self._lock:
            self._buffer.prepared(what)

    def checkpoint(self, step: int) -> None:
        """A complete checkpoint of `step` is on disk."""
        with self._lock:
            self._buffer.checkpoint(step)

    def memory(self, step: int) -> None:
        """All ranks have `step` complete in memory."""
        with self._lock:
            self._buffer.memory(step)

    def links(self, samples: Iterable[LinkSample]) -> None:
        """Add samples of links that were measured apart from steps."""
        with self._lock:
            for sample in samples:
                self._buffer.link(sample)

    def begin_view(self, view: int, id: WorkerId) -> None:
        """Begin a view: later measurements belong to it."""
        with self._lock:
            if (telemetry := self._take(id)) is not None:
                self._earlier.append(telemetry)
            self._view, self.urgent, self.links_so_far = view, True, None

    def take(self, id: WorkerId) -> WorkerTelemetry | None:
        """Return the next telemetry to send, as TelemetryBuffer does; that of an earlier view comes first,
        separately."""
        asked = self.links_so_far
        links = tuple(asked()) if asked is not None else ()  # who tells may wait for a lock, whose holder tells of it
        with self._lock:
            if asked is self.links_so_far:
                for sample in links:
                    self._buffer.link(sample)
            telemetry = self._earlier.popleft() if self._earlier else self._take(id)
            self.urgent = bool(self._earlier)
            return telemetry

    def _take(self, id: WorkerId) -> WorkerTelemetry | None:
        telemetry = self._buffer.take(id)
        if telemetry is not None:
            telemetry.view = self._view
        return telemetry

    def lost(self, telemetry: WorkerTelemetry) -> None:
        """Count the steps of an unsent telemetry as dropped."""
        with self._lock:
            self._buffer.drop_steps(len(telemetry.steps))
