"""Events of workers and instructions about them: what the state machine and its shell exchange."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from atoll.jobs.worker_key import WorkerKey
from atoll.v1.common_pb2 import ViewReport


class ExitKind(Enum):
    """As in protos/atoll/v1/common.proto."""

    FINISHED = 1
    DRAINED = 2
    PEER_LOST = 3
    FAILED = 4
    SIGNALLED = 5
    UNRESPONSIVE = 6
    NOT_STARTED = 7
    STOPPED = 8


@dataclass(frozen=True, slots=True)
class Exit:
    kind: ExitKind
    code: int
    """Negative: the signal. 0 for a worker that never was a process."""
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchRequested:
    key: WorkerKey
    stall_timeout_s: float
    hang_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchRefused:
    """The Launch made no sense for this node."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True, slots=True)
class CodeReady:
    key: WorkerKey


@dataclass(frozen=True, slots=True)
class StartFailed:
    key: WorkerKey
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    key: WorkerKey
    pid: int
    now_s: float


@dataclass(frozen=True, slots=True)
class HelloReceived:
    key: WorkerKey
    now_s: float


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """saving, saved_bytes: whether it writes a checkpoint, and how much it has written of any. view: how it stands
    towards the views of its run; None of one that says nothing of them. volunteer_port: where it takes volunteers'
    help; 0: nowhere. waits: for other ranks, just now."""

    key: WorkerKey
    step: int
    plan: int
    now_s: float
    trained: bool = False
    saving: bool = False
    saved_bytes: int = 0
    view: ViewReport | None = None
    volunteer_port: int = 0
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The process, its process group and its output are at an end."""

    key: WorkerKey
    exit_code: int
    out_of_memory: bool
    """The kernel killed something for want of memory while this worker lived."""
    last_words: str
    """From the output: the exception's last line, or the last line of any kind."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Of this run and all older ones of the job; or only of these ranks of the run, which goes on without them."""

    job: str
    run: int
    grace_s: float
    reason: str
    now_s: float
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ForgetRequested:
    key: WorkerKey


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """The agent ends: stop everything, start nothing more."""

    grace_s: float
    reason: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time went on. `stopped`: workers whose process the kernel shows as stopped (state T)."""

    now_s: float
    stopped: frozenset[WorkerKey] = frozenset()


Event: TypeAlias = (
    LaunchRequested
    | LaunchRefused
    | CodeReady
    | StartFailed
    | Started
    | HelloReceived
    | SignOfLife
    | Ended
    | StopRequested
    | ForgetRequested
    | CloseRequested
    | Ticked
)


@dataclass(frozen=True, slots=True)
class FetchCode:
    """Have the job's code here; answered by CodeReady or StartFailed, later."""

    key: WorkerKey


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Answered by Started or StartFailed before any other event."""

    key: WorkerKey


@dataclass(frozen=True, slots=True)
class SendStop:
    key: WorkerKey
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    """To the worker's whole process group."""

    key: WorkerKey
    signal: int


@dataclass(frozen=True, slots=True)
class Release:
    """The worker is forgotten, or never became a process: let go of what was kept for it."""

    key: WorkerKey


@dataclass(frozen=True, slots=True)
class Tell:
    """People should know this of a worker."""

    key: WorkerKey
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Something changed that the controller should hear of now."""


Instruction: TypeAlias = FetchCode | StartProcess | SendStop | SendSignal | Release | Tell | Report
