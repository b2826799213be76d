"""Makes spans of a job's recorded events: what a trace shows of it. Pure: messages in, descriptions out.

    job
      queued
      run 1
        starting
        running
          first step
        stopping
      recovery
        detecting, ending, waiting for devices, starting

Changes of a run's members are children of the run. Every other event is a moment of the span in which it happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from atoll.cli.render import wire
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

Attributes = dict[str, str | int | float]

ROOT: Final = "job"
_PHASES: Final = (
    common.EVENT_KIND_QUEUED,
    common.EVENT_KIND_RUNNING,
    common.EVENT_KIND_STOPPING,
    common.EVENT_KIND_DONE,
    common.EVENT_KIND_FAILED,
    common.EVENT_KIND_CANCELLED,
)
_PAUSES: Final[dict[int, str]] = {
    common.EVENT_KIND_CHANGED_IN_PLACE: "change in place",
    common.EVENT_KIND_CHANGED_AT_BOUNDARY: "change at a boundary",
    common.EVENT_KIND_RECOVERED: "recovery",
    common.EVENT_KIND_RESIZED: "resize",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanMoment:
    """An event at one time within a span."""

    name: str
    unix_s: float
    attributes: Attributes


@dataclass(slots=True, kw_only=True)
class JobSpan:
    """A span of a job's trace. `key` is its name within the trace, the same at every export; parent: a key, empty of
    the root. end_unix_s: None of what is not over. failure: why it failed, empty where it did not."""

    key: str
    parent: str
    name: str
    start_unix_s: float
    end_unix_s: float | None = None
    attributes: Attributes = field(default_factory=dict)
    moments: list[SpanMoment] = field(default_factory=list)
    failure: str = ""

    def close(self, unix_s: float) -> None:
        """End it, if it has not ended. Wall clocks of two controllers may differ: never before it began."""
        if self.end_unix_s is None:
            self.end_unix_s = max(unix_s, self.start_unix_s)


def trace_id(job: pb.Job) -> int:
    """Return 128 bits, the same at every export. The submit time is part: a removed job's id may be used again."""
    return _digest(f"{job.id} {job.submitted_unix_s!r}", 16)


def span_id(job: pb.Job, key: str) -> int:
    """Return 64 bits, the same at every export."""
    return _digest(f"{job.id} {job.submitted_unix_s!r} {key}", 8)


def spans_of(job: pb.Job, events: Sequence[common.Event]) -> list[JobSpan]:
    """Return the job's spans, the root first.

    events: in order. etcd keeps the newest events of a long job; older ones leave a gap.
    """
    building = _SpanBuilder(job)
    for event in events:
        building.add(event)
    return building.spans


class _SpanBuilder:
    """Build spans event by event. The open ones are those of the job, its run and its phase."""

    def __init__(self, job: pb.Job) -> None:
        self._job = job
        known: Attributes = {"atoll.job.name": job.spec.name, "atoll.job.strategy": job.strategy or "dense"}
        self.spans: list[JobSpan] = []
        self._root = self._phase = self._open(ROOT, "", f"job {job.id}", job.submitted_unix_s, known)
        self._run: JobSpan | None = None
        self._from_submit = False

    def add(self, event: common.Event) -> None:
        """Take the next event."""
        if event.kind == common.EVENT_KIND_SUBMITTED:
            self._from_submit = True
            self._next("queued", self._root, event, "")
        elif event.kind == common.EVENT_KIND_STARTING:
            self._launched(event)
        elif event.kind in _PHASES:
            self._entered(wire.event_kind(event), event.cause, event)
        elif event.kind in _PAUSES:
            self._paused(_PAUSES[event.kind], event)
        elif event.kind == common.EVENT_KIND_FIRST_STEP:
            self._stepped(event)
        else:
            attributes: Attributes = {"atoll.text": event.text, "atoll.level": wire.level(event)}
            name = wire.event_kind(event)
            self._phase.moments.append(SpanMoment(name=name, unix_s=event.unix_s, attributes=attributes))

    def _launched(self, event: common.Event) -> None:
        name = f"run {event.run}"
        self._run = self._open(name, ROOT, name, event.unix_s, {"atoll.run": event.run})
        self._next("starting", self._run, event, event.cause)

    def _entered(self, phase: str, reason: str, event: common.Event) -> None:
        within = self._run or self._root
        if phase == "stopping" and event.level >= common.LEVEL_WARNING and self._run is not None:
            self._run.failure = reason
        if phase in ("running", "stopping"):
            self._next(phase, within, event, reason)
            return
        if self._run is not None:
            self._run.close(event.unix_s)
        if phase == "queued":
            self._run = None
            self._next(phase, self._root, event, reason)
            return
        self._over(self._phase, event.unix_s)
        if phase == "failed":
            self._root.failure = reason
            if self._run is not None:
                self._run.failure = self._run.failure or reason
        self._root.attributes |= {"atoll.job.phase": phase, "atoll.reason": reason}
        self._root.close(event.unix_s)
        self._phase, self._run = self._root, None

    def _next(self, phase: str, parent: JobSpan, event: common.Event, reason: str) -> None:
        """End the span of the phase and begin that of the next."""
        self._over(self._phase, event.unix_s)
        attributes: Attributes = {"atoll.reason": reason} if reason else {}
        self._phase = self._open(f"{phase} {event.sequence}", parent.key, phase, event.unix_s, attributes)

    def _over(self, phase: JobSpan, unix_s: float) -> None:
        if phase is not self._root:
            phase.close(unix_s)

    def _stepped(self, event: common.Event) -> None:
        """Add the span up to the first step that all workers of a run completed."""
        attributes: Attributes = {"atoll.text": event.text}
        parent = self._phase
        span = self._open(f"first step {event.sequence}", parent.key, "first step", parent.start_unix_s, attributes)
        span.close(event.unix_s)
        if self._from_submit:  # else an earlier run's may be gone
            waited_s = round(event.unix_s - self._root.start_unix_s, 6)
            self._root.attributes.setdefault("atoll.job.submit_to_first_step_s", waited_s)

    def _paused(self, name: str, event: common.Event) -> None:
        """Add the spans of a pause that has just ended. Its parts follow each other; the last one ends with it."""
        start_unix_s = event.unix_s - max(event.total_s, 0.0)
        within = self._run if event.view and self._run is not None else self._root
        attributes: Attributes = {"atoll.text": event.text, "atoll.run": event.run}
        attributes |= {"atoll.view": event.view} if event.view else {}
        whole = self._open(f"{name} {event.sequence}", within.key, name, start_unix_s, attributes)
        whole.close(event.unix_s)
        at_s = start_unix_s
        parts = [part for part in event.parts if part.seconds > 0]
        for number, part in enumerate(parts, 1):
            span = self._open(f"{whole.key} {part.name}", whole.key, part.name, at_s, {})
            at_s = min(at_s + part.seconds, event.unix_s)
            span.close(event.unix_s if number == len(parts) else at_s)

    def _open(self, key: str, parent: str, name: str, start_unix_s: float, attributes: Attributes) -> JobSpan:
        of_job: Attributes = {"atoll.job.id": self._job.id}
        span = JobSpan(
            key=key, parent=parent, name=name, start_unix_s=start_unix_s, attributes={**of_job, **attributes}
        )
        self.spans.append(span)
        return span


def _digest(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1  # 0 is no id
