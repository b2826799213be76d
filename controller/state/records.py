"""Records in etcd: frozen dataclasses, written and read by `codec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from atoll.controller.state.recovery import RecoveryRecord
from atoll.jobs.etcd_record import EtcdRecord
from atoll.jobs.job_spec import JobSpec
from atoll.strategies import registry


class JobPhase(StrEnum):
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self in (JobPhase.DONE, JobPhase.FAILED, JobPhase.CANCELLED)

    @property
    def active(self) -> bool:
        """True if a run has devices in this phase."""
        return self in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING)


class WorkerExitKind(StrEnum):
    """Kinds of atoll.v1.ExitKind, and LOST: no agent is left that could report the end."""

    FINISHED = "FINISHED"
    DRAINED = "DRAINED"
    PEER_LOST = "PEER_LOST"
    FAILED = "FAILED"
    SIGNALLED = "SIGNALLED"
    UNRESPONSIVE = "UNRESPONSIVE"
    NOT_STARTED = "NOT_STARTED"
    STOPPED = "STOPPED"
    LOST = "LOST"


class Cause(StrEnum):
    """Cause of stopping a run."""

    LOSS = "LOSS"  # a worker ended in some other way than by finishing, or its node is gone
    GROW = "GROW"  # more devices are free
    SHRINK = "SHRINK"  # it is faster without some of its devices
    CANCEL = "CANCEL"
    LATE = "LATE"  # not all workers started in time
    LEFT_EARLY = "LEFT_EARLY"  # a rank finished while the others went on


class Level(StrEnum):
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange(EtcdRecord):
    """One transition of a job, for its history."""

    before: JobPhase
    after: JobPhase
    cause: str
    unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure(EtcdRecord):
    """Failure of a run, to compare with the next one's. `times`: runs in a row that failed like this."""

    kind: WorkerExitKind
    step: int
    code: int
    reason: str
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted(EtcdRecord):
    """Values of a plan beside the split; as in PlanRecord. strategy: the one that strategy_params are of; empty: the
    spec's."""

    strategy: str = ""
    strategy_params: Mapping[str, Any] = field(default_factory=dict)
    total_batch: int = 0
    learning_rate_factor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby(EtcdRecord):
    """A device that a job leaves out, and why. work_per_s: what it measured then; a device that measures otherwise is
    assessed anew. slowed: how many workers the run had that was measured to be faster without it; 0: predicted."""

    reason: str
    work_per_s: float = 0.0
    slowed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory(EtcdRecord):
    """Samples that a device holds at once in a job; 0 where that is not known. trained: the most that it trained.
    measured: the most by its measured peak memory. failed: the fewest for which its memory did not suffice; allowed:
    the most that plans may give it since. repeated: it failed again with as many as before."""

    trained: int = 0
    measured: int = 0
    failed: int = 0
    allowed: int = 0
    repeated: bool = False

    @property
    def max_batch(self) -> int:
        """Return the most samples that plans may give the device; 0 if nothing bounds them."""
        known = max(self.measured, self.trained) if self.measured else 0
        return min(known or self.allowed, self.allowed or known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth(EtcdRecord):
    """Speed of a job when it last admitted devices, until it is known whether they helped.

    run, view: the last without them, which had `workers`. added: "node/device". samples_per_s: at total_batch samples a
    step, with the relative standard error `error`.
    """

    run: int
    added: tuple[str, ...]
    workers: int
    samples_per_s: float
    total_batch: int
    error: float
    view: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneIsland(EtcdRecord):
    """The island that would train faster alone, as an event told the user. together_s, alone_s: the result of planner
    `one-island` for `input`."""

    island: str
    together_s: float
    alone_s: float
    reason: str
    input: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftStrategy(EtcdRecord):
    """A strategy that a job left, with the seconds of its step and of the slowest rank's computing, and the bits a
    second of the thinnest link then."""

    strategy: str
    step_s: float
    compute_s: float
    bandwidth_bps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(EtcdRecord):
    """State of a job. run: the number of its newest run, 0 before the first; view: of that run's newest view, 0 if it
    has none. checkpoint_step, memory_step: of the newest checkpoint on disk and in memory. events, admissions: the
    number that was written."""

    phase: JobPhase = JobPhase.QUEUED
    reason: str = ""
    run: int = 0
    view: int = 0
    restarts: int = 0
    retry_delay_s: float = 0.0
    ended_unix_s: float = 0.0
    exit_code: int = 0
    checkpoint_step: int = 0
    memory_step: int = 0
    events: int = 0
    admissions: int = 0
    last_failure: RunFailure | None = None
    history: tuple[PhaseChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLearned(EtcdRecord):
    """Findings of earlier runs, for the next one; 0 and empty until they are known.

    initial_batch: the script's own total batch. optimizer: family of its optimizers. batches_per_update: batches that
    an update adds up. workload_fingerprint: of what its script prepared. shared_bytes, own_bytes: state of all ranks,
    and of each. adapted: the controller's last decision, for the first plan of the next run. By "node/device":
    speeds, seconds per sample; learned_at, the work_per_s that those devices measured then; memory, the samples that
    they hold; standby, the devices that the job leaves out. one_island: None while no island is known to train faster
    alone. strategy: what the controller chose for a job that leaves it to the controller, and strategy_reason why.
    strategy_judged: planner `strategy` chose it. strategy_switches: how often it did. left_strategy: the one before.
    refused_strategies: by name, why the job's script does not allow them, as its workers found."""

    total_batch: int = 0
    initial_batch: int = 0
    optimizer: str = ""
    batches_per_update: int = 0
    workload_fingerprint: str = ""
    shared_bytes: int = 0
    own_bytes: int = 0
    adapted: Adapted | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)
    learned_at: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, DeviceMemory] = field(default_factory=dict)
    standby: Mapping[str, Standby] = field(default_factory=dict)
    growth: Growth | None = None
    one_island: OneIsland | None = None
    strategy: str = ""
    strategy_reason: str = ""
    strategy_judged: bool = False
    strategy_switches: int = 0
    left_strategy: LeftStrategy | None = None
    refused_strategies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPins(EtcdRecord):
    """Values that a user pinned, for this run and later ones; empty and 0 if they are not pinned. shares are of the
    members of view `view` of run `run`. strategy_by: the user who pinned the strategy."""

    strategy_params: Mapping[str, Any] = field(default_factory=dict)
    total_batch: int = 0
    shares: tuple[float, ...] = ()
    run: int = 0
    view: int = 0
    strategy: str = ""
    strategy_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(EtcdRecord):
    """A job: its user's spec, its state, the findings of its runs, the user's pins."""

    id: str
    spec: JobSpec
    request_id: str
    submitted_unix_s: float = 0.0
    cancel: bool = False
    submitted_by: str = ""  # common name of a certificate, or "unauthenticated"
    cancelled_by: str = ""
    status: JobStatus = JobStatus()
    learned: JobLearned = JobLearned()
    pinned: JobPins = JobPins()

    @property
    def leaves_strategy(self) -> bool:
        """Return True if the job leaves its strategy to the controller."""
        return self.spec.strategy == registry.AUTO

    @property
    def own_strategy(self) -> str:
        """Return the strategy without a user's pin."""
        if not self.leaves_strategy:
            return self.spec.strategy
        return self.learned.strategy or registry.default().name

    @property
    def wanted_strategy(self) -> str:
        """Return the strategy by which the job is to train from its next view or run on."""
        return self.pinned.strategy or self.own_strategy

    def settings_of(self, strategy: str) -> Mapping[str, Any]:
        """Return the job's settings of a strategy: those of the spec, or the defaults of another one."""
        return self.spec.strategy_settings if strategy == self.spec.strategy else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord(EtcdRecord):
    """The recorded end of a worker. order: counts the exits of its run as they were recorded, from 0. uses_atoll: the
    worker had called atoll.init. overflow_batch: samples of its step for which its memory did not suffice, else 0."""

    kind: WorkerExitKind
    code: int = 0
    reason: str = ""
    step: int = 0
    order: int = 0
    uses_atoll: bool = False
    overflow_batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMember(EtcdRecord):
    rank: int
    node: str
    device: int
    node_rank: int
    local_rank: int
    local_world_size: int
    exit: ExitRecord | None = None
    island: str = ""
    behind_nat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(EtcdRecord):
    """A run. `data_seed`: 32 secret bytes in hex, from which every rank's data key is derived; empty if none is needed.
    `recovery`: from this run's loss, or from the loss that led to it."""

    job: str
    run: int
    members: tuple[RunMember, ...]
    master_address: str
    master_port: int
    began_unix_s: float
    ended_unix_s: float = 0.0
    fenced: bool = False
    cause: Cause | None = None
    grace_s: float = 0.0
    why: str = ""
    data_seed: str = field(default="", repr=False)
    recovery: RecoveryRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(EtcdRecord):
    """A plan with its planner's input and output as text: `atoll decide PLANNER < input` gives `output`.

    measured_s: compute time of a step on the slowest rank when this was decided, 0 if nothing was measured yet.
    strategy_params: parameters for the job's strategy. total_batch: 0 for the script's own. learning_rate_factor:
    times the script's own rate, 0 for 1. passes: in which each rank trains its part of a batch. predicted_s: time of a
    step under it, 0 if not predicted. view: the view whose members its shares are of, by position.
    """

    run: int
    id: int
    from_step: int
    shares: tuple[float, ...]
    planner: str
    reason: str
    input: str
    output: str
    measured_s: float = 0.0
    strategy_params: Mapping[str, Any] = field(default_factory=dict)
    total_batch: int = 0
    learning_rate_factor: float = 0.0
    predicted_s: float = 0.0
    view: int = 1
    passes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRecord(EtcdRecord):
    """Machines of a view that keep copies of each other's state: `atoll decide placement < input` gives `output`."""

    run: int
    reason: str
    input: str
    output: str
    view: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRecord(EtcdRecord):
    """A decision that changed something: of planner `admission` about devices that may join a run, or about its slowest
    worker, or of planner `strategy`. `atoll decide PLANNER < input` gives `output`."""

    id: int
    run: int
    unix_s: float
    reason: str
    input: str
    output: str
    planner: str = "admission"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord(EtcdRecord):
    index: int
    kind: str
    model: str
    memory_bytes: int
    speed: float
    work_per_s: float = 0.0
    uuid: str = ""
    sharers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord(EtcdRecord):
    """island: the operator's name if there is one, else the island that was measured. island_reason: why it is in that
    island; empty while nothing is known."""

    name: str
    island: str
    address: str
    memory_bytes: int
    devices: tuple[DeviceRecord, ...]
    version: str
    host: str = ""
    rack: str = ""
    checkpoint_memory_bytes: int = 0
    shards_port: int = 0
    shards_key: str = ""
    volunteer: bool = False
    behind_nat: bool = False
    named_island: str = ""
    island_reason: str = ""
