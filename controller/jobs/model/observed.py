"""Observations of the reconciler and the actions that it asks for: plain data, so that its decisions are functions of
values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from atoll.controller.estimators.profile import Profile
from atoll.controller.jobs.model.peer_links import PeerLinks
from atoll.controller.jobs.model.script_facts import ScriptFacts
from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.jobs.model.strategy_in_force import strategy_in_force
from atoll.controller.state.events import NewEvent
from atoll.controller.state.records import (
    AdmissionRecord,
    DeviceRecord,
    ExitRecord,
    JobRecord,
    NodeRecord,
    PlacementRecord,
    PlanRecord,
    RunMember,
    RunRecord,
)
from atoll.controller.state.views import ViewRecord, ViewState
from atoll.jobs.worker_key import WorkerKey

START_DEADLINE_S: Final = 60.0
"""How long a job's first start may take until all workers live; `failures.start_deadline_s` has the next ones'."""
LEFT_EARLY_S: Final = 10.0
GROW_STABLE_S: Final = 3.0
RETURN_GRACE_S: Final = 20.0
"""Seconds that a new leader waits for nodes without a message before it declares them lost. Their agents may first wait
for the previous leader, whose connections stay open while it is silent."""
WORKER_DEATH_S: Final = 0.5
"""Workers die within this time of their agent, by the kernel's hand: a lost node has no process of ours left then."""
PARTED_S: Final = 1.5
"""An agent whose stream is gone for this long, and whose workers were lost by their peers, is not waited for."""
CANCEL_DEADLINE_S: Final = 5.0
ABSENT_S: Final = 1.5
"""A report this long after the stop went out, without the worker in it: that worker never began."""


class ViewStage(Enum):
    """Stages of a worker in its run's views; atoll.v1.ViewStage describes each."""

    JOINING = auto()
    READY = auto()
    TRAINING = auto()
    BROKEN = auto()
    FORMING = auto()
    FAILED = auto()
    UNABLE = auto()


class WayIn(NamedTuple):
    """Seconds of a worker's way into its view, since it noticed that the one before was over; 0: not come to that."""

    aborted_s: float = 0.0
    told_s: float = 0.0
    met_s: float = 0.0
    agreed_s: float = 0.0
    first_step_s: float = 0.0


class WorkerViewReport(NamedTuple):
    """A worker's own word. step: completed ones. lost: ranks that it misses, where it can tell. takes_in: it can leave
    a view at a boundary. tolerates_loss_mid_step: it completes a step in which a peer is
    lost, and comes to a boundary.
    handed_bytes: of state that changed hands so far, between it and others. strategy: by which it trains in the view;
    refusal: why that is not the view's. overflow_batch: samples for which its memory did not suffice, which broke the
    view; else 0."""

    view: int
    stage: ViewStage
    step: int = 0
    reason: str = ""
    lost: tuple[int, ...] = ()
    way: WayIn = WayIn()
    takes_in: bool = False
    tolerates_loss_mid_step: bool = False
    handed_bytes: int = 0
    strategy: str = ""
    refusal: str = ""
    overflow_batch: int = 0

    def left_for(self, view: int) -> bool:
        """Return True if it has left every view older than this one for good."""
        return self.view >= view and self.stage not in (ViewStage.JOINING, ViewStage.READY)

    def trains_in(self, view: int) -> bool:
        return self.view == view and self.stage is ViewStage.TRAINING


@dataclass(frozen=True, slots=True)
class ObservedViews:
    """The kept views of the newest run, oldest first. On this leader's monotonic clock: `since_s`, since when the
    newest is in its state; `broken_since_s`, since when a member is lost or says that it is broken, None where none is;
    `joining_since_s`, since when the newest joiner is there; `handed_since_s`, when state last moved between members.
    `sent`: by node, the newest view that its present stream carried, and the newest in force that it told of."""

    kept: tuple[ViewRecord, ...] = ()
    since_s: float = 0.0
    broken_since_s: float | None = None
    joining_since_s: float = 0.0
    sent: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    handed_since_s: float = 0.0

    @property
    def newest(self) -> ViewRecord | None:
        return self.kept[-1] if self.kept else None

    @property
    def in_force(self) -> ViewRecord | None:
        """Return the view in force; there is at most one."""
        return next((view for view in reversed(self.kept) if view.state is ViewState.IN_FORCE), None)


class WorkerPhase(Enum):
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    EXITED = auto()


class ObservedWorker(NamedTuple):
    """A worker as its agent reported it, thousands of times a second. `exit` is set where `phase` is EXITED. `trained`:
    its loop over the epochs is over. `view_report`: its report on the views of its run, None if it
    makes none."""

    phase: WorkerPhase
    step: int = 0
    plan: int = 0
    uses_atoll: bool = False
    exit: ExitRecord | None = None
    trained: bool = False
    view_report: WorkerViewReport | None = None


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node that has, or had, an agent. Times are of the monotonic clock; `last_message_s` is None if this leader
    received no message. `ports`: rendezvous ports it holds free; `memory_jobs`: whose checkpoints are in its memory."""

    record: NodeRecord
    connected: bool
    last_message_s: float | None
    workers: Mapping[WorkerKey, ObservedWorker] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    memory_jobs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PassClock:
    """Clocks of one pass. `now_s` is monotonic and decides; `unix_s` is only shown to people. `awaiting_since_s`: since
    when nodes that this leader never heard of may come back to it, less what it slept through itself."""

    now_s: float
    unix_s: float
    awaiting_since_s: float
    node_lease_s: float


@dataclass(frozen=True, slots=True)
class ObservedPlans:
    """The plans of the newest run, oldest first, and its placement. `planned_s`: when the newest plan was issued;
    `sent`: by node, the newest plan that its present stream carried. `refused`: run and number of the plan under which
    an event said that the planner finds no other."""

    issued: tuple[PlanRecord, ...] = ()
    placement: PlacementRecord | None = None
    planned_s: float = 0.0
    sent: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[int, int] | None = None

    @property
    def newest(self) -> PlanRecord | None:
        return self.issued[-1] if self.issued else None


@dataclass(frozen=True, slots=True)
class ObservedTraining:
    """The newest run, as its workers report it. `profile`: what they measured, `profile_is_news`: the last pass did not
    have it; `links`: bits per second from an island to the others. `total_batch`: the largest under the newest plan;
    `batch_size`, `samples`: what the script gave, of the whole job and its dataset; 0 before. `optimizer`,
    `batches_per_update`: family of its optimizers, and what an update adds up; empty and 0 before.
    `workload_fingerprint`: of what it prepared, empty before; `state_bytes`: of checkpoints in memory, of all ranks and
    of each, 0 before. `resumed`: tier and step that the run went on from, once its workers said so;
    `stepped`: a step of it was heard of. `checkpoint_step`, `memory_step`: of the newest on disk and in memory.
    `script`: facts that rank 0 reported at `run.prepare`; None before, and of scripts that do not call it."""

    profile: Profile | None = None
    profile_is_news: bool = False
    links: Mapping[str, float] = field(default_factory=dict)
    total_batch: int = 0
    batch_size: int = 0
    samples: int = 0
    optimizer: str = ""
    batches_per_update: int = 0
    workload_fingerprint: str = ""
    state_bytes: tuple[int, int] = (0, 0)
    newest_step: int = 0
    stepped: bool = False
    resumed: tuple[str, int] | None = None
    checkpoint_step: int = 0
    memory_step: int = 0
    script: ScriptFacts | None = None


@dataclass(frozen=True, slots=True)
class ObservedDevices:
    """Devices that the job may take, and by node the rendezvous ports that no run uses. unreachable: why others are
    left out; empty where none is."""

    free: Sequence[FreeDevice] = ()
    ports: Mapping[str, Sequence[int]] = field(default_factory=dict)
    unreachable: str = ""


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """One job with its newest run, the nodes of that run (of a waiting job: all), and what is free. On the monotonic
    clock: `since_s`, since when this phase lasts, as far as this controller knows; `finished_since_s`, since when a
    rank of this run has finished; `judged_s`, when free devices were last assessed. `data_seed`: a secret for a run
    that would begin now, where it needs one. `peer_links`: what agents measured between nodes."""

    job: JobRecord
    run: RunRecord | None
    nodes: Mapping[str, ObservedNode]
    since_s: float
    finished_since_s: float | None = None
    judged_s: float = -math.inf
    plans: ObservedPlans = ObservedPlans()
    training: ObservedTraining = ObservedTraining()
    devices: ObservedDevices = ObservedDevices()
    views: ObservedViews = field(default_factory=ObservedViews)
    peer_links: PeerLinks = field(default_factory=PeerLinks, repr=False)
    data_seed: str = field(default="", repr=False)
    workers: Mapping[int, ObservedWorker] = field(init=False, repr=False, compare=False)
    """Of `run`, by rank: those that the nodes tell of on which they belong, and that are there."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", _workers_of(self.run, self.nodes) if self.run else {})

    @property
    def strategy(self) -> str:
        """Return the name of the strategy by which the newest run trains; before the first one, the wanted one."""
        return strategy_in_force(self.job, self.views.kept)

    def device_of(self, member: RunMember) -> DeviceRecord | None:
        """Return the record of a member's device; None if its node is not known."""
        node = self.nodes.get(member.node)
        return next((one for one in node.record.devices if one.index == member.device), None) if node else None


def _workers_of(run: RunRecord, nodes: Mapping[str, ObservedNode]) -> dict[int, ObservedWorker]:
    """Node by node: many more members than nodes, and this is asked of every run in every pass."""
    found, members = {}, run.members
    for name in {member.node for member in members}:
        node = nodes.get(name)
        if node is None or not node.connected:
            continue
        for (job, number, rank), worker in node.workers.items():
            if number == run.run and job == run.job and rank < len(members) and members[rank].node == name:
                found[rank] = worker
    return found


@dataclass(frozen=True, slots=True)
class LaunchWorkers:
    """Workers of one run to start on one node, in one message. joins: a single worker starts beside the current view
    and joins a later one."""

    node: str
    job: str
    run: int
    ranks: tuple[int, ...]
    joins: bool = False


@dataclass(frozen=True, slots=True)
class StopRun:
    """ranks: these alone, and the run goes on; empty: all of it, and of older ones."""

    node: str
    job: str
    run: int
    grace_s: float
    reason: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendView:
    """The newest view, and the newest that is in force."""

    node: str
    job: str
    run: int
    view: int
    in_force: int


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    node: str
    key: WorkerKey


@dataclass(frozen=True, slots=True)
class SendPlan:
    node: str
    job: str
    run: int
    plan: int


@dataclass(frozen=True, slots=True)
class DropMemory:
    node: str
    job: str


Action: TypeAlias = LaunchWorkers | StopRun | ForgetWorker | SendPlan | SendView | DropMemory


@dataclass(frozen=True, slots=True)
class JobStep:
    """The result of one pass over a job. `job`, `run`, `plan`, `placement` and `views` are what to write, where they
    changed; actions are sent after that is written. `held`: devices that the job waits with, kept from jobs behind it.
    `judged`: free devices were assessed. `refused`: an event says that the planner finds no plan to
    follow the newest. `decisions`: about free devices and the strategy, where they are news."""

    job: JobRecord
    run: RunRecord | None
    plan: PlanRecord | None = None
    events: tuple[NewEvent, ...] = ()
    actions: tuple[Action, ...] = ()
    held: tuple[FreeDevice, ...] = ()
    judged: bool = False
    refused: bool = False
    placement: PlacementRecord | None = None
    decisions: tuple[AdmissionRecord, ...] = ()
    views: tuple[ViewRecord, ...] = ()
