"""Events of real jobs on three local agents, as `atoll events` had them (2026-11-23): what came when, and the words."""

from __future__ import annotations

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

SUBMITTED_UNIX_S = 1_795_466_234.0

Told = tuple[float, int, str, str, str]
"""Seconds after the submit, run, level, kind, text."""

BEGINNING: list[Told] = [
    (0.01, 0, "info", "phase", "submitted (unauthenticated): tiny.py on 3 to 3 workers"),
    (0.02, 1, "info", "phase", "run 1: starting 3 workers on 3 nodes (local-0/0, local-1/0, local-2/0)"),
    (0.02, 1, "info", "plan", "plan 1 (even): the same for all 3 workers"),
    (0.27, 1, "info", "phase", "running: run 1: 3 workers training"),
    (6.94, 1, "info", "membership", "view 1: 3 workers completed their first step 6.9 s after the launch"),
]
IN_PLACE: list[Told] = [
    *BEGINNING,
    (9.90, 1, "warning", "worker", "run 1: rank 1 on local-1 was killed at step 48: killed by signal 9 (SIGKILL)"),
    (10.43, 1, "info", "membership", "run 1: rank 3 on local-1/0 starts beside view 1, to join it"),
    (
        12.63,
        1,
        "warning",
        "membership",
        "view 2: rank 1 on local-1 was killed at step 48: killed by signal 9 (SIGKILL); 3 workers go on in place "
        "(ranks 0, 3, 2)",
    ),
    (
        13.09,
        1,
        "info",
        "membership",
        "view 2: 3 workers went on in place after 3.20 s from step 54: 0.00 noticed, 0.01 aborted, 2.75 told, "
        "0.08 formed, 0.28 agreed, 0.07 first step; rank 1 on local-1 lost; rank 3 on local-1 joined",
    ),
]
CANCELLED: list[Told] = [
    *IN_PLACE,
    (18.17, 1, "info", "phase", "cancel was asked for (unauthenticated)"),
    (18.17, 1, "info", "phase", "stopping: cancelled"),
    (18.45, 1, "info", "worker", "run 1: rank 0 on local-0 stopped at a step boundary, step 139"),
    (18.45, 1, "info", "phase", "cancelled: cancelled"),
]
DONE: list[Told] = [*IN_PLACE, (30.0, 1, "info", "phase", "done: all 3 ranks finished")]
KILLED = "rank 0 on local-0 was killed at step 64: killed by signal 9 (SIGKILL)"
RESTARTED: list[Told] = [
    *BEGINNING,
    (9.57, 1, "warning", "phase", f"stopping: {KILLED}"),
    (9.62, 1, "info", "phase", "queued: rank 0 on local-0 was lost: killed by signal 9 (SIGKILL)"),
    (9.65, 2, "info", "phase", "run 2: starting 3 workers on 3 nodes (local-0/0, local-1/0, local-2/0)"),
    (9.70, 2, "info", "phase", "running: run 2: 3 workers training"),
    (
        16.21,
        2,
        "info",
        "recovery",
        "recovered in 6.6 s: 0.0 detecting, 0.1 ending, 6.5 starting; from memory, step 69, no steps lost",
    ),
    (16.74, 2, "info", "membership", "view 1: 3 workers completed their first step 7.1 s after the launch"),
    (33.42, 2, "info", "phase", "done: all 3 ranks finished"),
]
TWICE = "rank 1 on local-2 failed: IndexError: list index out of range; the run before failed the same way at step 0"
FAILED: list[Told] = [
    (0.01, 0, "info", "phase", "submitted (unauthenticated): bad.py on 2 to 2 workers"),
    (0.01, 1, "info", "phase", "run 1: starting 2 workers on 2 nodes (local-1/0, local-2/0)"),
    (0.04, 1, "info", "phase", "running: run 1: 2 workers training"),
    (2.10, 1, "warning", "phase", "stopping: rank 0 on local-1 failed with exit code 1 at step 0: IndexError"),
    (2.16, 1, "info", "phase", "queued: rank 0 on local-1 failed: IndexError; restart 1 of 1 in 1 s"),
    (3.69, 2, "info", "phase", "run 2: starting 2 workers on 2 nodes (local-1/0, local-2/0)"),
    (3.71, 2, "info", "phase", "running: run 2: 2 workers training"),
    (3.80, 2, "warning", "phase", "stopping: rank 1 on local-2 failed with exit code 1 at step 0: IndexError"),
    (3.81, 2, "error", "phase", f"failed: {TWICE}"),
]


def recorded_job(name: str = "vit-3f9a") -> pb.Job:
    """The job that these are of."""
    spec = common.JobSpec(name=name.rpartition("-")[0], script="tiny.py")
    return pb.Job(id=name, spec=spec, submitted_unix_s=SUBMITTED_UNIX_S)


def recorded_events(told: list[Told], job: str = "vit-3f9a") -> list[common.Event]:
    """As the controller sends them."""
    return [
        common.Event(
            sequence=sequence,
            unix_s=SUBMITTED_UNIX_S + at_s,
            level=common.Level.Value(f"LEVEL_{level.upper()}"),
            job=job,
            run=run,
            kind=kind,
            text=text,
        )
        for sequence, (at_s, run, level, kind, text) in enumerate(told, 1)
    ]
