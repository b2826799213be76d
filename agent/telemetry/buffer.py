"""The telemetry of one worker between two messages, in the worker and in its agent. Bounded: the oldest goes first,
counted."""

from __future__ import annotations

from collections import deque

from atoll.network.message_limits import MAX_TEXT
from atoll.telemetry.telemetry_limits import MAX_LINKS, MAX_NOTICES, MAX_REPORTS, MAX_STEPS
from atoll.v1.agents_pb2 import Notice, Prepared, Resumed, WorkerTelemetry
from atoll.v1.common_pb2 import Level, LinkSample, Metrics, StepSample, WorkerId


class TelemetryBuffer:
    """Not thread-safe. `changed`: `take` has something. `stepped`: a step came, ever."""

    def __init__(self) -> None:
        self.changed = self.stepped = False
        self.view = 0
        self._steps: deque[StepSample] = deque(maxlen=MAX_STEPS)
        self._metrics: deque[Metrics] = deque(maxlen=MAX_REPORTS)
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self._links: dict[int, LinkSample] = {}  # by peer; counts since the run began, so the newest is enough
        self._dropped_steps = self._dropped_before = 0  # here; by who fills this buffer
        self._checkpoint_step = self._memory_step = 0
        self._prepared: Prepared | None = None
        self._resumed: Resumed | None = None

    def of_view(self, view: int) -> bool:
        """All that comes now is of this view of the run. Of an older one than the newest nothing may come: False. What
        was measured in an older one and not sent is of no use any more."""
        if view > self.view:
            self._steps.clear()
            self._links.clear()
            self._memory_step, self._resumed, self.view = 0, None, view
        return view == self.view

    def step(self, sample: StepSample) -> None:
        self._dropped_steps += len(self._steps) == MAX_STEPS
        self._steps.append(sample)
        self.stepped = self.changed = True

    def newest_step(self, sample: StepSample) -> None:
        """The only one to be told: the others are in what was made of them."""
        self._steps.clear()
        self.step(sample)

    def drop_steps(self, count: int) -> None:
        """Count measured steps that will not be sent."""
        self._dropped_steps += count
        self.changed = True

    def dropped_before(self, count: int) -> None:
        """Set the number of steps that were dropped before they came here, since the run began."""
        self._dropped_before = max(self._dropped_before, count)
        self.changed = True

    def metrics(self, metrics: Metrics) -> None:
        self._metrics.append(metrics)
        self.changed = True

    def notice(self, level: Level.ValueType, text: str) -> None:
        self._notices.append(Notice(level=level, text=text[:MAX_TEXT]))
        self.changed = True

    def link(self, sample: LinkSample) -> None:
        self._links[sample.peer] = sample
        self.changed = True

    def prepared(self, what: Prepared) -> None:
        self._prepared = what
        self.changed = True

    def resumed(self, where: Resumed) -> None:
        self._resumed = where
        self.changed = True

    def checkpoint(self, step: int) -> None:
        """A complete checkpoint of `step` is on disk."""
        self._checkpoint_step = max(self._checkpoint_step, step)
        self.changed = True

    def memory(self, step: int) -> None:
        """All ranks have `step` complete in memory."""
        self._memory_step = max(self._memory_step, step)
        self.changed = True

    def take(self, id: WorkerId) -> WorkerTelemetry | None:
        """Everything since the last call; None where nothing changed. Counts are from the start.

        Of more than MAX_LINKS links the others follow with the next call."""
        if not self.changed:
            return None
        telemetry = WorkerTelemetry(
            id=id,
            steps=self._steps,
            dropped_steps=self._dropped_steps + self._dropped_before,
            metrics=self._metrics,
            notices=self._notices,
            checkpoint_step=self._checkpoint_step,
            memory_step=self._memory_step,
            links=[self._links.pop(peer) for peer in list(self._links)[:MAX_LINKS]],
            prepared=self._prepared,
            resumed=self._resumed,
            view=self.view,
        )
        self._steps.clear()
        self._metrics.clear()
        self._notices.clear()
        self.changed = bool(self._links)
        return telemetry
