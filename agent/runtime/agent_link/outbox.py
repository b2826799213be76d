"""Collects a worker's telemetry until the link's next turn. Bounded: the oldest go first, counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from atoll.v1.agents_pb2 import Notice, Prepared, Resumed, WorkerTelemetry
from atoll.v1.common_pb2 import Level, LinkSample, Metrics, StepSample, WorkerId

MAX_STEPS: Final = 256
MAX_METRICS: Final = 64
MAX_NOTICES: Final = 64
MAX_LINKS: Final = 64


class Outbox:
    """Filled by the training thread, emptied by the link's. No call waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[StepSample] = deque()
        self._metrics: deque[Metrics] = deque(maxlen=MAX_METRICS)
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self._links: dict[int, LinkSample] = {}
        self._dropped = 0
        self._prepared: Prepared | None = None
        self._resumed: Resumed | None = None
        self._stepped = False
        self._checkpoint_step = 0
        self._memory_step = 0
        self._changed = False
        self.urgent = False
        """The first step was done: a recovery ends with it."""

    def step(self, sample: StepSample) -> None:
        with self._lock:
            if len(self._steps) == MAX_STEPS:
                self._steps.popleft()
                self._dropped += 1
            self._steps.append(sample)
            self._changed = True
            self.urgent = self.urgent or not self._stepped
            self._stepped = True

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._metrics.append(Metrics(step=step, values=values))
            self._changed = True

    def notice(self, level: Level.ValueType, text: str) -> None:
        with self._lock:
            self._notices.append(Notice(level=level, text=text[:4096]))
            self._changed = True

    def resumed(self, tier: str, step: int) -> None:
        """Training begins at `step`, from a checkpoint in "memory" or on "disk", or from the "start"."""
        with self._lock:
            self._resumed = Resumed(tier=tier, step=step)
            self._changed = True

    def prepared(self, what: Prepared) -> None:
        with self._lock:
            self._prepared = what
            self._changed = True

    def lost(self, telemetry: WorkerTelemetry) -> None:
        """What `take` gave could not be sent. Its steps count as dropped."""
        with self._lock:
            self._dropped += len(telemetry.steps)
            self._changed = True

    def checkpoint(self, step: int) -> None:
        """A complete checkpoint of `step` is on disk."""
        with self._lock:
            self._checkpoint_step = max(self._checkpoint_step, step)
            self._changed = True

    def memory(self, step: int) -> None:
        """All ranks have `step` complete in memory."""
        with self._lock:
            self._memory_step = max(self._memory_step, step)
            self._changed = True

    def links(self, samples: Iterable[LinkSample]) -> None:
        """What the links to peers have carried since the run began; of each peer the newest is told."""
        with self._lock:
            for sample in samples:
                self._links[sample.peer] = sample
                self._changed = True

    def take(self, id: WorkerId) -> WorkerTelemetry | None:
        """Everything since the last call; None where nothing happened. dropped_steps counts from the start.

        Of more than MAX_LINKS links the others follow with the next call."""
        with self._lock:
            self.urgent = False
            if not self._changed:
                return None
            message = WorkerTelemetry(
                id=id,
                steps=self._steps,
                dropped_steps=self._dropped,
                metrics=self._metrics,
                notices=self._notices,
                checkpoint_step=self._checkpoint_step,
                memory_step=self._memory_step,
                links=[self._links.pop(peer) for peer in list(self._links)[:MAX_LINKS]],
                prepared=self._prepared,
                resumed=self._resumed,
            )
            self._steps.clear()
            self._metrics.clear()
            self._notices.clear()
            self._changed = bool(self._links)
            return message
