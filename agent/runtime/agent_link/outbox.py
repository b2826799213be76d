"""Collects a worker's telemetry until the link's next turn."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from atoll.agent.telemetry.buffer import TelemetryBuffer
from atoll.v1.agents_pb2 import Prepared, Resumed, WorkerTelemetry
from atoll.v1.common_pb2 import Level, LinkSample, Metrics, StepSample, WorkerId


class Outbox:
    """Filled by the training thread, emptied by the link's. No call waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = TelemetryBuffer()
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
        """What the links to peers have carried since the run began; of each peer the newest is sent."""
        with self._lock:
            for sample in samples:
                self._buffer.link(sample)

    def take(self, id: WorkerId) -> WorkerTelemetry | None:
        """As of TelemetryBuffer."""
        with self._lock:
            self.urgent = False
            return self._buffer.take(id)

    def lost(self, telemetry: WorkerTelemetry) -> None:
        """What `take` gave could not be sent. Its steps count as dropped."""
        with self._lock:
            self._buffer.drop_steps(len(telemetry.steps))
