"""Declares a job's events by fields, and renders the sentence of each kind. No other code words an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from atoll.controller.state.records import JobPhase, Level
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
    ISLAND_CHANGED = "ISLAND_CHANGED"
    NODE = "NODE"
    WORKER_NOTICE = "WORKER_NOTICE"
    NOTICE = "NOTICE"
    DROPPED = "DROPPED"
    STRATEGY_CHANGED = "STRATEGY_CHANGED"
    STRATEGY_REFUSED = "STRATEGY_REFUSED"
    STRATEGY_ASKED = "STRATEGY_ASKED"


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
    strategies: tuple[str, ...] = ()
    """The strategy that was left, and the one after it."""

    @property
    def text(self) -> str:
        """Render the sentence."""
        if (words := _COMPOSED.get(self.kind)) is not None:
            return words(self)
        return _SENTENCES.get(self.kind, "{e.cause}").format(e=self)  # of others the cause is the whole sentence


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
    """'view 2: rank 1 on b was killed; 2 workers continue in place (ranks 0, 2)'."""
    count = len(event.ranks)
    who = "1 worker continues alone" if count == 1 else f"{count} workers continue"
    how = "from a step boundary" if event.at_boundary else "in place"
    ranks = ", ".join(map(str, event.ranks[:MAX_RANKS_NAMED])) + ("" if count <= MAX_RANKS_NAMED else ", …")
    return f"view {event.view}: {event.cause}; {who} {how} (rank{'s' * (count > 1)} {ranks})"


def _changed(event: NewEvent) -> str:
    """'view 2: 2 workers continued in place after 0.84 s from step 9: 0.05 noticed, 0.12 aborted, ...; a lost'."""
    changes = ((event.lost, "lost"), (event.joined, "joined"))
    changed = "".join(f"; {', '.join(names[:MAX_NAMED])} {what}" for names, what in changes if names)
    how = "paused for" if event.kind is EventKind.CHANGED_AT_BOUNDARY else "continued in place after"
    who = "1 worker, alone," if event.workers == 1 else _workers(event.workers)
    return f"view {event.view}: {who} {how} {event.total_s:.2f} s from step {event.step}: {_parts(event, 2)}{changed}"


def _switched(event: NewEvent) -> str:
    """'view 2: switched from dense to local-steps at step 120, paused for 0.31 s: ...; asked by client:ada'."""
    before, after = event.strategies
    how = f"switched from {before} to {after} at step {event.step}: {event.cause}"
    return f"view {event.view}: {how}; paused for {event.total_s:.2f} s: {_parts(event, 2)}"


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


def _first_step(event: NewEvent) -> str:
    who = f"{_workers(event.workers)} completed {'their' if event.workers > 1 else 'its'} first step"
    return f"view {event.view}: {who} {event.total_s:.1f} s after the launch"


def _planned(event: NewEvent) -> str:
    planner = f" ({event.planner})" if event.planner else ""
    start = "" if event.step is None else f" from step {event.step}"
    return f"plan {event.plan}{planner}{start}: {event.cause}"


_SENTENCES: Final[Mapping[EventKind, str]] = {
    **{EventKind(phase): f"{phase.lower()}: {{e.cause}}" for phase in JobPhase if phase is not JobPhase.STARTING},
    EventKind.SUBMITTED: "submitted ({e.by}): {e.cause}",
    EventKind.CANCEL_REQUESTED: "cancel requested ({e.by})",
    EventKind.RESTART_NEEDED: "run {e.run} cannot continue in place: {e.cause}",
    EventKind.WORKER_ENDED: "run {e.run}: rank {e.rank} on {e.node} {e.cause}",
    EventKind.WORKERS_ENDED: "run {e.run}: {e.count} more workers ended: {e.cause}",
    EventKind.PLAN_KEPT: "plan {e.plan} stays: the planner finds no other. {e.cause}",
    EventKind.STRATEGY_ASKED: "strategy {e.cause} requested ({e.by})",
    EventKind.UNPINNED: "{e.cause}: decided by the controller again (requested by {e.by})",
    EventKind.DEVICE_ADMITTED: "{e.device} is admitted: {e.cause}",
    EventKind.DEVICE_STANDBY: "{e.device} waits as a standby: {e.cause}",
    EventKind.NODE_JOINED: "node {e.node} joined: {e.cause}",
    EventKind.VOLUNTEER_JOINED: "volunteer {e.node} joined: {e.cause}",
    EventKind.NODE_LOST: "node {e.node} was lost: {e.cause}",
    EventKind.ISLAND_CHANGED: "node {e.node} is now in island {e.cause}",
    EventKind.WORKER_NOTICE: "rank {e.rank}: {e.cause}",
    EventKind.DROPPED: "{e.count} {e.cause}",
}
_COMPOSED: Final[Mapping[EventKind, Callable[[NewEvent], str]]] = {
    EventKind.STARTING: lambda e: f"run {e.run}: {e.cause} ({', '.join(e.devices)})",
    EventKind.WORKERS_JOINING: lambda e: (
        f"run {e.run}: {', '.join(e.joined[:MAX_NAMED])} starts beside view {e.view}, to join it"
    ),
    EventKind.FIRST_STEP: _first_step,
    EventKind.VIEW_PROPOSED: _proposed,
    EventKind.CHANGED_IN_PLACE: _changed,
    EventKind.CHANGED_AT_BOUNDARY: _changed,
    EventKind.STRATEGY_CHANGED: _switched,
    EventKind.STRATEGY_REFUSED: lambda e: (
        f"strategy {e.strategies[1]} is not taken, {e.strategies[0]} stays: {e.cause}"
    ),
    EventKind.RECOVERED: _recovered,
    EventKind.RESIZED: _recovered,
    EventKind.PLAN_ISSUED: _planned,
}
"""Sentences that depend on how many there are, or on what is known."""
