"""Events of workers and instructions about them: what the state machine and its shell exchange."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from atoll.jobs.worker_key import WorkerKey
from atoll.v1.worker_pb2 import Alive


class ExitKind(Enum):
    """Kinds of a worker's exit, as in protos/atoll/v1/common.proto."""

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
    """Exit code; negative: the signal. 0 for a worker that never was a process."""
    reason: str
    out_of_memory: bool = False
    """The memory of its device or machine did not suffice."""


@dataclass(frozen=True, slots=True)
class LaunchRequested:
    key: WorkerKey
    stall_timeout_s: float
    hang_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchRefused:
    """This node cannot carry out the Launch."""

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
    key: WorkerKey
    alive: Alive
    now_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The process, its process group and its output have ended."""

    key: WorkerKey
    exit_code: int
    out_of_memory: bool
    """The kernel killed a process for lack of memory while this worker lived."""
    last_words: str
    """The exception's last line in the output, or else its last line."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Stop this run and all older ones of the job, or only these ranks of the run."""

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
    """The agent ends: stop all workers, start none."""

    grace_s: float
    reason: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """A timer event. `stopped`: workers whose process the kernel shows as stopped (state T)."""

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
    """Fetch the job's code; answered later by CodeReady or StartFailed."""

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
    """Signal the worker's whole process group."""

    key: WorkerKey
    signal: int


@dataclass(frozen=True, slots=True)
class Release:
    """Free the worker's resources: it is forgotten, or never became a process."""

    key: WorkerKey


@dataclass(frozen=True, slots=True)
class Notify:
    """Write an event about a worker."""

    key: WorkerKey
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Report to the controller now: something changed."""


Instruction: TypeAlias = FetchCode | StartProcess | SendStop | SendSignal | Release | Notify | Report
