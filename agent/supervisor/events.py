"""What happens to workers, and what is to be done about it: the words between the state machine and its shell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias


class Key(NamedTuple):
    """Which worker. Ordered: by job, then run, then rank."""

    job: str
    run: int
    rank: int

    def __str__(self) -> str:
        return f"{self.job} run {self.run} rank {self.rank}"


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
class LaunchAsked:
    key: Key
    stall_timeout_s: float
    hang_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchRefused:
    """The Launch made no sense for this node."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class CodeReady:
    key: Key


@dataclass(frozen=True, slots=True)
class StartFailed:
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    key: Key
    pid: int
    now_s: float


@dataclass(frozen=True, slots=True)
class HelloSaid:
    key: Key
    now_s: float


@dataclass(frozen=True, slots=True)
class AliveSaid:
    key: Key
    step: int
    plan: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The process, its process group and its output are at an end."""

    key: Key
    exit_code: int
    out_of_memory: bool
    """The kernel killed something for want of memory while this worker lived."""
    last_words: str
    """From the output: the exception's last line, or the last line of any kind."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Of this run and all older ones of the job."""

    job: str
    run: int
    grace_s: float
    reason: str
    now_s: float


@dataclass(frozen=True, slots=True)
class ForgetAsked:
    key: Key


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """The agent ends: stop everything, start nothing more."""

    grace_s: float
    reason: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time went on. `stopped`: workers whose process the kernel shows as stopped (state T)."""

    now_s: float
    stopped: frozenset[Key] = frozenset()


Event: TypeAlias = (
    LaunchAsked
    | LaunchRefused
    | CodeReady
    | StartFailed
    | Started
    | HelloSaid
    | AliveSaid
    | Ended
    | StopAsked
    | ForgetAsked
    | CloseAsked
    | Ticked
)


@dataclass(frozen=True, slots=True)
class FetchCode:
    """Have the job's code here; answered by CodeReady or StartFailed, later."""

    key: Key


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Answered by Started or StartFailed before any other event."""

    key: Key


@dataclass(frozen=True, slots=True)
class SendStop:
    key: Key
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    """To the worker's whole process group."""

    key: Key
    signal: int


@dataclass(frozen=True, slots=True)
class Release:
    """The worker is forgotten, or never became a process: let go of what was kept for it."""

    key: Key


@dataclass(frozen=True, slots=True)
class Tell:
    """People should know this of a worker."""

    key: Key
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Something changed that the controller should hear of now."""


Instruction: TypeAlias = FetchCode | StartProcess | SendStop | SendSignal | Release | Tell | Report
