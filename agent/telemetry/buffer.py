"""The telemetry of one worker between two messages, in the worker and in its agent. Bounded: the oldest goes first,
counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from atoll.network.message_limits import MAX_TEXT
from atoll.telemetry.telemetry_limits import MAX_LINKS, MAX_NOTICES, MAX_REPORTS, MAX_STEPS
from atoll.v1.agents_pb2 import Notice, Prepared, Resumed, WorkerTelemetry
from atoll.v1.common_pb2 import LinkSample, Metrics, StepSample, WorkerId


class TelemetryBuffer:
    """Thread-safe; no call waits. `changed`: `take` has something. `stepped`: a step came, ever."""

    def __init__(self, view: int = 0) -> None:
        self.changed = self.stepped = False
        self.view = view
        self._lock = threading.RLock()
        self._steps: deque[StepSample] = deque(maxlen=MAX_STEPS)
        self._metrics: deque[Metrics] = deque(maxlen=MAX_REPORTS)
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self._links: dict[int, LinkSample] = {}  # by peer; counts since the run began, so the newest is enough
        self._dropped_steps = self._dropped_before = 0  # here; before they came here
        self._checkpoint_step = self._memory_step = 0
        self._prepared: Prepared | None = None
        self._resumed: Resumed | None = None

    def of_view(self, view: int) -> bool:
        """Return whether what comes now, measured in `view` of the run, counts: not that of an older view. A newer view
        clears what was measured in an older one and not sent."""
        if view > self.view:
            self._steps.clear()
            self._links.clear()
            self._memory_step, self._resumed, self.view = 0, None, view
        return view == self.view

    def add(
        self,
        *,
        steps: Sequence[StepSample] = (),
        metrics: Iterable[Metrics] = (),
        notices: Iterable[Notice] = (),
        links: Iterable[LinkSample] = (),
        prepared: Prepared | None = None,
        resumed: Resumed | None = None,
        checkpoint_step: int = 0,
        memory_step: int = 0,
        dropped_steps: int = 0,
        dropped_before: int = 0,
    ) -> None:
        """Add measurements.

        resumed: where training begins: from "memory", from "disk" or at the "start". checkpoint_step: complete on
        disk. memory_step: complete in the memory of all ranks. dropped_steps: measured, and will not be sent.
        dropped_before: since the run began, before they came here."""
        with self._lock:
            self._dropped_steps += max(len(self._steps) + len(steps) - MAX_STEPS, 0) + dropped_steps
            self._dropped_before = max(self._dropped_before, dropped_before)
            self._steps.extend(steps)
            self._metrics.extend(metrics)
            self._notices.extend(Notice(level=each.level, text=each.text[:MAX_TEXT]) for each in notices)
            self._links.update((sample.peer, sample) for sample in links)
            self._prepared, self._resumed = prepared or self._prepared, resumed or self._resumed
            self._checkpoint_step = max(self._checkpoint_step, checkpoint_step)
            self._memory_step = max(self._memory_step, memory_step)
            self.stepped, self.changed = self.stepped or bool(steps), True

    def newest_step(self, sample: StepSample) -> None:
        """Add the only step to be sent: the others are in the estimate that was made of them."""
        self._steps.clear()
        self.add(steps=[sample])

    def take(self, id: WorkerId) -> WorkerTelemetry | None:
        """Return everything since the last call; None if nothing changed. Counts are from the start.

        Of more than MAX_LINKS links the others follow with the next call."""
        with self._lock:
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
