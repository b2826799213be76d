"""Collects a worker's telemetry until the link's next turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from atoll.agent.telemetry.buffer import TelemetryBuffer
from atoll.v1.agents_pb2 import Notice, WorkerTelemetry
from atoll.v1.common_pb2 import Level, LinkSample, Metrics, StepSample, WorkerId


class Outbox(TelemetryBuffer):
    """Filled by the training thread, emptied by the link's."""

    links_so_far: Callable[[], Iterable[LinkSample]] | None = None
    """Traffic of this view's links to peers so far. The link's thread calls it for every report, since a training
    thread that waits for a link reports nothing. The newest sample of each peer is sent."""

    def __init__(self) -> None:
        super().__init__(view=1)
        self._earlier: deque[WorkerTelemetry] = deque()  # of earlier views
        self.urgent = False
        """The first step was done: a recovery ends with it."""

    def step(self, sample: StepSample) -> None:
        self.urgent = self.urgent or not self.stepped
        self.add(steps=[sample])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.add(metrics=[Metrics(step=step, values=values)])

    def notice(self, level: Level.ValueType, text: str) -> None:
        self.add(notices=[Notice(level=level, text=text)])

    def links(self, samples: Iterable[LinkSample]) -> None:
        """Add samples of links that were measured apart from steps."""
        if told := list(samples):
            self.add(links=told)

    def begin_view(self, view: int, id: WorkerId) -> None:
        """Begin a view: later measurements belong to it."""
        with self._lock:
            if (telemetry := super().take(id)) is not None:
                self._earlier.append(telemetry)
            self.view, self.urgent, self.links_so_far = view, True, None

    def take(self, id: WorkerId) -> WorkerTelemetry | None:
        """Return the next telemetry to send; that of an earlier view comes first, separately."""
        asked = self.links_so_far
        links = tuple(asked()) if asked is not None else ()  # who tells may wait for a lock, whose holder tells of it
        with self._lock:
            if links and asked is self.links_so_far:
                self.add(links=links)
            telemetry = self._earlier.popleft() if self._earlier else super().take(id)
            self.urgent = bool(self._earlier)
            return telemetry
