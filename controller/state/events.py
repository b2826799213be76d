"""Declares a job's events by fields, and renders the sentence of each kind. No other code words an event."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from atoll.controller.state.records import Level
from atoll.jobs.etcd_record import EtcdRecord

MAX_NAMED: Final = 8
"""Nodes or devices that a sentence names."""
MAX_RANKS_NAMED: Final = 16


class EventKind(StrEnum):
    """Kinds of events. protos/atoll/v1/common.proto has the same names."""

    SUBMITTED = "SUBMITTED"
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    CANCEL_REQUESTED = "CANCEL_REQUESTED"
    FIRST_STEP = "FIRST_STEP"
    VIEW_PROPOSED = "VIEW_PROPOSED"
    WORKERS_JOINING = "WORKERS_JOINING"
    CHANGED_IN_PLACE = "CHANGED_IN_PLACE"
    CHANGED_AT_BOUNDARY = "CHANGED_AT_BOUNDARY"
    RESTART_NEEDED = "RESTART_NEEDED"
    RECOVERED = "RECOVERED"
    RESIZED = "RESIZED"
    WORKER_ENDED = "WORKER_ENDED"
    WORKERS_ENDED = "WORKERS_ENDED"
    PLAN_ISSUED = "PLAN_ISSUED"
    PLAN_KEPT = "PLAN_KEPT"
    UNPINNED = "UNPINNED"
    PLACEMENT = "PLACEMENT"
    CONNECTIVITY = "CONNECTIVITY"
    PROFILE_REFUSED = "PROFILE_REFUSED"
    DEVICE_ADMITTED = "DEVICE_ADMITTED"
    DEVICE_STANDBY = "DEVICE_STANDBY"
    DEVICES_ASSESSED = "DEVICES_ASSESSED"
    ADVICE = "ADVICE"
    NODE_JOINED = "NODE_JOINED"
    VOLUNTEER_JOINED = "VOLUNTEER_JOINED"
    NODE_LOST = "NODE_LOST"
    NODE = "NODE"
    WORKER_NOTICE = "WORKER_NOTICE"
    NOTICE = "NOTICE"
    DROPPED = "DROPPED"


@dataclass(frozen=True, slots=True)
class TimedPart(EtcdRecord):
    """A part of a pause, in seconds. Parts follow each other in time."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent(EtcdRecord):
    """An event before it has its number. Fields that its kind does not use stay at their defaults."""

    kind: EventKind
    level: Level = Level.INFO
    run: int = 0
    cause: str = ""
    """Why it happened, or the whole sentence of a notice."""
    rank: int | None = None
    node: str = ""
    device: str = ""
    """NODE/INDEX."""
    view: int = 0
    step: int | None = None
    """Completed steps, or the first step of a plan."""
    plan: int = 0
    planner: str = ""
    """The planner of a launch's first plan."""
    tier: str = ""
    """Source of the restored state: memory, disk, or start."""
    steps_lost: int | None = None
    """Steps to train again. None: unknown."""
    workers: int = 0
    ranks: tuple[int, ...] = ()
    at_boundary: bool = False
    devices: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    count: int = 0
    """Events, workers or measurements that no event of their own reports."""
    by: str = ""
    """The user who asked for it."""
    total_s: float = 0.0
    parts: tuple[TimedPart, ...] = ()

    @property
    def text(self) -> str:
        """Render the sentence."""
        match self.kind:
            case EventKind.SUBMITTED:
                return f"submitted ({self.by}): {self.cause}"
            case EventKind.CANCEL_REQUESTED:
                return f"cancel was asked for ({self.by})"
            case EventKind.STARTING:
                return f"run {self.run}: {self.cause} ({', '.join(self.devices)})"
            case EventKind.FIRST_STEP:
                who = f"{_workers(self.workers)} completed {'their' if self.workers > 1 else 'its'} first step"
                return f"view {self.view}: {who} {self.total_s:.1f} s after the launch"
            case EventKind.VIEW_PROPOSED:
                return _proposed(self)
            case EventKind.CHANGED_IN_PLACE | EventKind.CHANGED_AT_BOUNDARY:
                return _changed(self)
            case EventKind.RECOVERED | EventKind.RESIZED:
                return _recovered(self)
            case EventKind.WORKERS_JOINING:
                names = ", ".join(self.joined[:MAX_NAMED])
                return f"run {self.run}: {names} starts beside view {self.view}, to join it"
            case EventKind.RESTART_NEEDED:
                return f"run {self.run} does not go on in place: {self.cause}"
            case EventKind.WORKER_ENDED:
                return f"run {self.run}: rank {self.rank} on {self.node} {self.cause}"
            case EventKind.WORKERS_ENDED:
                return f"run {self.run}: {self.count} more workers ended: {self.cause}"
            case EventKind.PLAN_ISSUED:
                planner = f" ({self.planner})" if self.planner else ""
                start = "" if self.step is None else f" from step {self.step}"
                return f"plan {self.plan}{planner}{start}: {self.cause}"
            case EventKind.PLAN_KEPT:
                return f"plan {self.plan} stays: the planner finds no other. {self.cause}"
            case EventKind.UNPINNED:
                return f"{self.cause}: left to the controller again (asked by {self.by})"
            case EventKind.DEVICE_ADMITTED:
                return f"{self.device} is admitted: {self.cause}"
            case EventKind.DEVICE_STANDBY:
                return f"{self.device} waits as a standby: {self.cause}"
            case EventKind.NODE_JOINED:
                return f"node {self.node} joined: {self.cause}"
            case EventKind.VOLUNTEER_JOINED:
                return f"volunteer {self.node} joined: {self.cause}"
            case EventKind.NODE_LOST:
                return f"node {self.node} was lost: {self.cause}"
            case EventKind.WORKER_NOTICE:
                return f"rank {self.rank}: {self.cause}"
            case EventKind.DROPPED:
                return f"{self.count} {self.cause}"
            case (
                EventKind.QUEUED
                | EventKind.RUNNING
                | EventKind.STOPPING
                | EventKind.DONE
                | EventKind.FAILED
                | EventKind.CANCELLED
            ):
                return f"{self.kind.lower()}: {self.cause}"
            case _:  # its cause is the whole sentence
                return self.cause


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord(NewEvent):
    """An event in etcd. sequence: per job, from 1. job: empty for an event of the cluster."""

    sequence: int
    unix_s: float
    job: str

    @classmethod
    def of(cls, event: NewEvent, *, sequence: int, unix_s: float, job: str, run: int) -> EventRecord:
        """Return the record of a new event."""
        given = {field.name: getattr(event, field.name) for field in fields(event)}
        return cls(**{**given, "sequence": sequence, "unix_s": unix_s, "job": job, "run": run})


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _parts(event: NewEvent, digits: int) -> str:
    return ", ".join(f"{part.seconds:.{digits}f} {part.name}" for part in event.parts)


def _proposed(event: NewEvent) -> str:
    """'view 2: rank 1 on b was killed; 2 workers go on in place (ranks 0, 2)'."""
    count = len(event.ranks)
    who = "1 worker goes on alone" if count == 1 else f"{count} workers go on"
    how = "from a step boundary" if event.at_boundary else "in place"
    ranks = ", ".join(map(str, event.ranks[:MAX_RANKS_NAMED])) + ("" if count <= MAX_RANKS_NAMED else ", …")
    return f"view {event.view}: {event.cause}; {who} {how} (rank{'s' * (count > 1)} {ranks})"


def _changed(event: NewEvent) -> str:
    """'view 2: 2 workers went on in place after 0.84 s from step 9: 0.05 noticed, 0.12 aborted, ...; a lost'."""
    changes = ((event.lost, "lost"), (event.joined, "joined"))
    changed = "".join(f"; {', '.join(names[:MAX_NAMED])} {what}" for names, what in changes if names)
    how = "paused for" if event.kind is EventKind.CHANGED_AT_BOUNDARY else "went on in place after"
    who = "1 worker, alone," if event.workers == 1 else _workers(event.workers)
    return f"view {event.view}: {who} {how} {event.total_s:.2f} s from step {event.step}: {_parts(event, 2)}{changed}"


def _recovered(event: NewEvent) -> str:
    """'recovered in 3.9 s: 0.4 detecting, 0.9 ending, 2.6 starting; from memory, step 812, 1 step lost; c took over'.

    A resize: 'resized in 3.5 s: 0.9 ending, 2.6 starting; ...; c joined'."""
    resized = event.kind is EventKind.RESIZED
    where = "the beginning" if event.tier == "start" else f"{event.tier}, step {event.step}"
    lost = event.steps_lost
    steps = "steps lost unknown" if lost is None else f"{lost or 'no'} step{'s' * (lost != 1)} lost"
    text = f"{event.kind.lower()} in {event.total_s:.1f} s: {_parts(event, 1)}; from {where}, {steps}"
    came = "joined" if resized else "took over"
    return f"{text}; {', '.join(event.joined[:MAX_NAMED])} {came}" if event.joined else text
