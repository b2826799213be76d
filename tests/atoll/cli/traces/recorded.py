"""Events of real jobs on three local agents (2026-11-23): their times, and the fields that the controller wrote."""

from __future__ import annotations

from atoll.controller.jobs.records.wire import event_to_wire
from atoll.controller.state.events import EventKind, EventRecord, NewEvent, TimedPart
from atoll.controller.state.records import Level
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

SUBMITTED_UNIX_S = 1_795_466_234.0

Recorded = tuple[float, int, NewEvent]
"""Seconds after the submit, run, event."""


def phase(kind: EventKind, cause: str, level: Level = Level.INFO) -> NewEvent:
    return NewEvent(kind=kind, cause=cause, level=level)


def started(*devices: str) -> NewEvent:
    cause = f"starting {len(devices)} workers on {len(devices)} nodes"
    return NewEvent(kind=EventKind.STARTING, cause=cause, devices=devices)


def first_step(workers: int, total_s: float) -> NewEvent:
    return NewEvent(kind=EventKind.FIRST_STEP, view=1, workers=workers, total_s=total_s)


def submitted(cause: str) -> NewEvent:
    return NewEvent(kind=EventKind.SUBMITTED, by="unauthenticated", cause=cause)


ALL_THREE = ("local-0/0", "local-1/0", "local-2/0")
LOST = "was killed at step 48: killed by signal 9 (SIGKILL)"
ENDED = NewEvent(kind=EventKind.WORKER_ENDED, level=Level.WARNING, rank=1, node="local-1", step=48, cause=LOST)
BEGINNING: list[Recorded] = [
    (0.01, 0, submitted("tiny.py on 3 workers")),
    (0.02, 1, started(*ALL_THREE)),
    (0.02, 1, NewEvent(kind=EventKind.PLAN_ISSUED, plan=1, planner="even", cause="equal batches for all 3 workers")),
    (0.27, 1, phase(EventKind.RUNNING, "run 1: 3 workers training")),
    (6.94, 1, first_step(3, 6.9)),
]
IN_PLACE: list[Recorded] = [
    *BEGINNING,
    (9.90, 1, ENDED),
    (10.43, 1, NewEvent(kind=EventKind.WORKERS_JOINING, view=1, joined=("rank 3 on local-1/0",))),
    (
        12.63,
        1,
        NewEvent(
            kind=EventKind.VIEW_PROPOSED,
            level=Level.WARNING,
            view=2,
            cause=f"rank 1 on local-1 {LOST}",
            ranks=(0, 3, 2),
        ),
    ),
    (
        13.09,
        1,
        NewEvent(
            kind=EventKind.CHANGED_IN_PLACE,
            view=2,
            step=54,
            workers=3,
            lost=("rank 1 on local-1",),
            joined=("rank 3 on local-1",),
            total_s=3.20,
            parts=(
                TimedPart("noticed", 0.0),
                TimedPart("aborted", 0.01),
                TimedPart("told", 2.75),
                TimedPart("formed", 0.08),
                TimedPart("agreed", 0.28),
                TimedPart("first step", 0.07),
            ),
        ),
    ),
]
CANCELLED: list[Recorded] = [
    *IN_PLACE,
    (18.17, 1, NewEvent(kind=EventKind.CANCEL_REQUESTED, by="unauthenticated")),
    (18.17, 1, phase(EventKind.STOPPING, "cancelled")),
    (
        18.45,
        1,
        NewEvent(
            kind=EventKind.WORKER_ENDED, rank=0, node="local-0", step=139, cause="stopped at a step boundary, step 139"
        ),
    ),
    (18.45, 1, phase(EventKind.CANCELLED, "cancelled")),
]
DONE: list[Recorded] = [*IN_PLACE, (30.0, 1, phase(EventKind.DONE, "all 3 ranks finished"))]
KILLED = "rank 0 on local-0 was killed at step 64: killed by signal 9 (SIGKILL)"
RESTARTED: list[Recorded] = [
    *BEGINNING,
    (9.57, 1, phase(EventKind.STOPPING, KILLED, Level.WARNING)),
    (9.62, 1, phase(EventKind.QUEUED, "rank 0 on local-0 was lost: killed by signal 9 (SIGKILL)")),
    (9.65, 2, started(*ALL_THREE)),
    (9.70, 2, phase(EventKind.RUNNING, "run 2: 3 workers training")),
    (
        16.21,
        2,
        NewEvent(
            kind=EventKind.RECOVERED,
            tier="memory",
            step=69,
            steps_lost=0,
            total_s=6.6,
            parts=(TimedPart("detecting", 0.0), TimedPart("ending", 0.1), TimedPart("starting", 6.5)),
        ),
    ),
    (16.74, 2, first_step(3, 7.1)),
    (33.42, 2, phase(EventKind.DONE, "all 3 ranks finished")),
]
TWICE = "rank 1 on local-2 failed: IndexError: list index out of range; the run before failed the same way at step 0"
FAILED: list[Recorded] = [
    (0.01, 0, submitted("bad.py on 2 workers")),
    (0.01, 1, started("local-1/0", "local-2/0")),
    (0.04, 1, phase(EventKind.RUNNING, "run 1: 2 workers training")),
    (
        2.10,
        1,
        phase(EventKind.STOPPING, "rank 0 on local-1 failed with exit code 1 at step 0: IndexError", Level.WARNING),
    ),
    (2.16, 1, phase(EventKind.QUEUED, "rank 0 on local-1 failed: IndexError; restart 1 of 1 in 1 s")),
    (3.69, 2, started("local-1/0", "local-2/0")),
    (3.71, 2, phase(EventKind.RUNNING, "run 2: 2 workers training")),
    (
        3.80,
        2,
        phase(EventKind.STOPPING, "rank 1 on local-2 failed with exit code 1 at step 0: IndexError", Level.WARNING),
    ),
    (3.81, 2, phase(EventKind.FAILED, TWICE, Level.ERROR)),
]


def recorded_job(name: str = "vit-3f9a") -> pb.Job:
    """The job that these are of."""
    spec = common.JobSpec(name=name.rpartition("-")[0], script="tiny.py")
    return pb.Job(id=name, spec=spec, submitted_unix_s=SUBMITTED_UNIX_S)


def recorded_events(recorded: list[Recorded], job: str = "vit-3f9a") -> list[common.Event]:
    """Return them as the controller sends them."""
    return [
        event_to_wire(EventRecord.of(event, sequence=sequence, unix_s=SUBMITTED_UNIX_S + at_s, job=job, run=run))
        for sequence, (at_s, run, event) in enumerate(recorded, 1)
    ]
