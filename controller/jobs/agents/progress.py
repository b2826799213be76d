"""Progress: the newest measurements of each job's current run. In memory only: agents repeat them every second."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from atoll.controller.deciding.given import ControllerHalf
from atoll.controller.estimators.bandwidth import ObservedLink
from atoll.controller.estimators.profile import Profile
from atoll.controller.estimators.run import RunEstimators
from atoll.controller.jobs.agents.reported import NewPoints, Reported
from atoll.controller.jobs.model.members import members_of
from atoll.controller.jobs.model.script_facts import ScriptFacts, facts_from_wire
from atoll.controller.jobs.records.wire import level_from_wire
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import Level, RunRecord
from atoll.controller.state.recovery import CommitRecord
from atoll.controller.state.views import ViewRecord
from atoll.step_estimators.wire import estimate_from_wire, norms_from_wire, step_from_wire, syncs_from_wire
from atoll.strategies import registry
from atoll.strategies.declaration import Declared
from atoll.telemetry.telemetry_limits import MAX_LINKS
from atoll.v1 import agents_pb2, common_pb2, jobs_pb2

RECENT_S: Final = 5.0
RECENT_STEPS: Final = 64
RECENT_WAITS: Final = 512
KEPT_NOTICES: Final = 64
KEPT_PLANS: Final = 64
PROFILE_EVERY_S: Final = 1.0
"""Interval of profiles, in seconds: agents report steps as often."""
COMMIT_EVERY_S: Final = 1.0
"""Interval of written commits, in seconds; of shorter steps only the newest is written."""


@dataclass(slots=True)
class RankProgress:
    last: common_pb2.StepSample | None = None
    links: dict[int, common_pb2.LinkSample] = field(default_factory=dict)  # newest, by peer
    dropped_steps: int = 0  # never received by this controller, since the run began


@dataclass(frozen=True, slots=True)
class Waited:
    """Duration of one step of one rank, and its strategy's metrics."""

    received_s: float
    step_s: float
    metrics: Mapping[str, float]


@dataclass(slots=True)
class RunProgress:
    """Progress of one view of a run; a newer run starts empty. Ranks here are positions in the view, except for the
    peers of links. `positions`: by rank in the run. `islands`: by position. `steps`: (time of receipt, seconds)
    of rank 0's newest steps. `steps_of`: the seconds alone by plan. `waits`: of the newest steps of all ranks."""

    run: int
    view: int = 1
    positions: Mapping[int, int] = field(default_factory=dict)
    islands: Mapping[int, str] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    estimators: RunEstimators = field(default_factory=RunEstimators)
    steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    steps_of: dict[int, deque[float]] = field(default_factory=dict)
    waits: deque[Waited] = field(default_factory=lambda: deque(maxlen=RECENT_WAITS))
    reported: Reported = field(default_factory=Reported)
    newest_step: int = 0
    total_batch: int = 0  # the largest under the newest plan: an epoch's last batch may be short
    plan: int = 0
    batch_size: int = 0  # of the whole job, as its script gave it; 0 before it is known
    samples: int = 0  # of its dataset
    optimizer: str = ""  # family of its optimizers; empty before it is known
    batches_per_update: int = 0
    epochs: int = 0  # that it trains in all, as rank 0 reported
    workload_fingerprint: str = ""  # of what rank 0's script prepared
    state_bytes: tuple[int, int] = (0, 0)  # of all ranks, of each
    script: ScriptFacts | None = None  # of rank 0
    checkpoint_step: int = 0
    memory_step: int = 0
    resumed: tuple[str, int] | None = None  # tier and step that it resumed from
    notices: deque[NewEvent] = field(default_factory=lambda: deque(maxlen=KEPT_NOTICES))
    notices_dropped: int = 0
    _profile: Profile | None = None
    _profiled_s: float = 0.0

    @property
    def stepped(self) -> bool:
        """Return True if a step of the run was reported."""
        return any(rank.last for rank in self.ranks.values())

    @property
    def next_step(self) -> int:
        """Return the first step that no rank has reported as finished."""
        return self.newest_step + 1 if self.stepped else 0

    def profile_is_due(self, now_s: float, every_s: float = PROFILE_EVERY_S) -> bool:
        """Return True if `profile` is to be renewed; not in every pass, since passes come in bursts."""
        return self._profile is None or now_s >= self._profiled_s + every_s

    def profile(self, now_s: float, *, renew: bool) -> tuple[Profile | None, bool]:
        """Return the run's profile, and whether it is new. renew: compute it; without that it may be None."""
        if not renew:
            return self._profile, False
        self._profile, self._profiled_s = self.estimators.profile(), now_s
        return self._profile, True

    def newly_complete(self, run: RunRecord, before: CommitRecord | None, unix_s: float) -> CommitRecord | None:
        """Return the generation in the machines' memory that counts now; None if it is the one before.

        It counts when all ranks have agreed in a step that their shards and the copies that are due are complete. Each
        of them then reports its step, so one report holds for all ranks.
        """
        now = (run.run, self.view, self.memory_step)
        if self.memory_step == 0 or (before is not None and (before.run, before.view, before.step) >= now):
            return None
        return CommitRecord(
            job=run.job,
            run=run.run,
            view=self.view,
            step=self.memory_step,
            shards=len(self.positions),
            unix_s=unix_s,
        )

    def measured_s(self, plan: int) -> float:
        """Return the median time of rank 0's steps under this plan; 0 if none was reported."""
        steps = self.steps_of.get(plan)
        return statistics.median(steps) if steps else 0.0

    def observe_step(self, rank: int, sample: common_pb2.StepSample, now_s: float, *, estimated: bool) -> None:
        """Add the newest step of a rank. estimated: its agent makes the estimate."""
        self.newest_step = max(self.newest_step, sample.step)
        if sample.plan > self.plan:
            self.plan, self.total_batch = sample.plan, 0
        if sample.plan == self.plan:
            self.total_batch = max(self.total_batch, sample.total_batch)
        if not estimated:
            self._learn(rank, sample, now_s)
        if rank == 0 and math.isfinite(sample.step_s):
            self.steps.append((now_s, sample.step_s))
            if sample.plan not in self.steps_of and len(self.steps_of) == KEPT_PLANS:
                del self.steps_of[min(self.steps_of)]
            self.steps_of.setdefault(sample.plan, deque(maxlen=RECENT_STEPS)).append(sample.step_s)

    def _learn(self, rank: int, sample: common_pb2.StepSample, now_s: float) -> None:
        observed = step_from_wire(sample)
        self.estimators.observe(rank, observed)
        if observed.step_s > 0 and observed.strategy_metrics:  # checked when they came
            self.waits.append(Waited(now_s, observed.step_s, observed.strategy_metrics))

    def to_wire(self, now_s: float) -> jobs_pb2.Progress:
        recent = [step_s for received_s, step_s in self.steps if now_s - received_s < RECENT_S]
        step_s = statistics.median(recent) if recent else 0.0
        lead = self.ranks.get(0)
        samples_per_s = self.total_batch / step_s if step_s > 0 else 0.0
        samples, left = self.epochs * self.samples, self._samples_left(lead.last if lead else None)
        return jobs_pb2.Progress(
            step=self.newest_step + 1 if self.total_batch else 0,
            epoch=lead.last.epoch if lead and lead.last else 0,
            samples_per_s=samples_per_s,
            step_s=step_s,
            metrics=self.reported.shown(),
            strategy_metrics=self._summaries(now_s, lead.last if lead else None),
            left_s=left / samples_per_s if samples_per_s else 0.0,
            trained_share=1 - left / samples if samples and lead and lead.last else 0.0,
        )

    def _samples_left(self, last: common_pb2.StepSample | None) -> int:
        """Return the samples until the end of the last epoch; 0 if unknown."""
        if last is None or not self.samples:
            return 0
        return max((self.epochs - last.epoch) * self.samples - last.consumed, 0)

    def _summaries(self, now_s: float, lead: common_pb2.StepSample | None) -> dict[str, float]:
        """Summarise the metrics that the strategy's workers reported, each as the strategy declares."""
        found = {}
        for name, value in lead.strategy_metrics.items() if lead else ():
            metric = registry.metrics()[name]
            recent = [(w.metrics.get(name, 0.0), w.step_s) for w in self.waits if now_s - w.received_s < RECENT_S]
            match metric.summary:
                case "newest":
                    found[metric.summary_name] = value
                case "mean":
                    found[metric.summary_name] = statistics.fmean(v for v, _ in recent) if recent else 0.0
                case "share of the step":
                    whole_s = sum(step_s for _, step_s in recent)
                    found[metric.summary_name] = min(sum(v for v, _ in recent) / whole_s, 1.0) if recent else 0.0
        return found


class ProgressBoard:
    """Progress by job. Messages of other runs than the newest one seen are dropped, and of other views of it than the
    one in force."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: dict[str, RunProgress] = {}

    def begin(
        self,
        run: RunRecord,
        half: Callable[[], ControllerHalf | None] = lambda: None,
        *,
        view: ViewRecord | None = None,
    ) -> RunProgress:
        """Return the progress of this run, and drop an older run's. half: of the job's strategy. view: in force, or the
        run's first. Of measurements in an older view only those of the whole job are kept."""
        found, number = self._runs.get(run.job), view.view if view is not None else 1
        if found is None or (found.run, found.view) < (run.run, number):
            made, members = half(), members_of(run, view)
            before = found if found is not None and found.run == run.run else RunProgress(run.run)
            found = self._runs[run.job] = replace(
                before,
                view=number,
                positions={member.rank: position for position, member in enumerate(members)},
                islands={position: member.island for position, member in enumerate(members)},
                nodes=frozenset(member.node for member in members),
                ranks={},
                estimators=RunEstimators(made.estimator() if made else None),
                memory_step=0,
                resumed=None,
                _profile=None,
                _profiled_s=0.0,
            )
        return found

    def of(self, job: str, run: int) -> RunProgress | None:
        found = self._runs.get(job)
        return found if found and found.run == run else None

    def drop(self, job: str) -> None:
        self._runs.pop(job, None)

    def observe(self, telemetry: agents_pb2.WorkerTelemetry) -> bool:
        """Add one worker's batch, already checked for size. Ignored if its run is not current.

        Return True if it reports the run's first step."""
        found = self.of(telemetry.id.job, telemetry.id.run)
        if found is None:
            return False
        position = found.positions.get(telemetry.id.rank)
        if position is None or (telemetry.view or 1) != found.view:
            return False
        if (rank := found.ranks.get(position)) is None:
            rank = found.ranks[position] = RankProgress()
        stepped = rank.last is not None or found.stepped
        now_s, estimated = self._clock(), telemetry.HasField("estimate")
        for sample in telemetry.steps:
            if rank.last is not None and sample.step <= rank.last.step:
                continue
            rank.last = sample
            found.observe_step(position, sample, now_s, estimated=estimated)
        if estimated:
            found.estimators.observe_rank(position, estimate_from_wire(telemetry.estimate))
        if telemetry.HasField("prepared"):
            found.batch_size, found.samples = telemetry.prepared.batch_size, telemetry.prepared.samples
            if position == 0:
                found.workload_fingerprint, found.epochs = telemetry.prepared.fingerprint, telemetry.prepared.epochs
                found.optimizer = telemetry.prepared.optimizer
                found.batches_per_update = telemetry.prepared.batches_per_update
                found.state_bytes = (telemetry.prepared.shared_bytes, telemetry.prepared.own_bytes)
                found.script = facts_from_wire(telemetry.prepared) or found.script
            found.estimators.observe_entries(telemetry.prepared.entries)
        if links := telemetry.links:
            self._observe_links(found, position, rank, links, now_s)
        if telemetry.HasField("resumed"):
            found.resumed = found.resumed or (telemetry.resumed.tier, telemetry.resumed.step)
        if telemetry.dropped_steps:
            self._observe_dropped(found, rank, telemetry)
        self._observe_notices(found, telemetry)
        return not stepped and found.stepped

    def report(self, telemetry: agents_pb2.WorkerTelemetry) -> NewPoints | None:
        """Add a script's metrics, of any view. Ignored if the run is not current."""
        found = self.of(telemetry.id.job, telemetry.id.run)
        if found is None or not telemetry.metrics:
            return None
        samples = telemetry.steps[-1].local_batch if telemetry.steps else 0
        due = found.reported.observe(
            telemetry.id.rank, samples, telemetry.metrics, self._clock(), workers=len(found.positions)
        )
        return NewPoints(found.reported, due) if due else None

    def on_message(self, job: str, run: int, rank: int, message: Declared) -> None:
        """Add a worker's message to its strategy. Ignored if the run is not current."""
        if (found := self.of(job, run)) is not None:
            found.estimators.on_message(rank, message)

    def observe_sums(self, node: str, sums: agents_pb2.StepSums) -> None:
        """Add checked sums of a node's workers. Ignored if the run is not current, or has no worker on that node."""
        found = self.of(sums.job, sums.run)
        if found is None or node not in found.nodes or (sums.view or 1) != found.view:
            return
        for step, sync in syncs_from_wire(sums):
            found.estimators.observe_sync(step, sync)
        for step, norms in norms_from_wire(sums):
            found.estimators.observe_norms(step, norms)

    @staticmethod
    def _observe_links(
        found: RunProgress, position: int, rank: RankProgress, links: Sequence[common_pb2.LinkSample], now_s: float
    ) -> None:
        for link in links:
            if link.peer in rank.links or len(rank.links) < MAX_LINKS:
                rank.links[link.peer] = link
        observed = [
            ObservedLink(peer=found.positions[k.peer], sent_bytes=k.sent_bytes + k.copied_bytes, busy_s=k.busy_s)
            for k in links
            if k.peer in found.positions
        ]
        found.estimators.observe_links(position, found.islands, observed, now_s)

    def _observe_dropped(self, found: RunProgress, rank: RankProgress, telemetry: agents_pb2.WorkerTelemetry) -> None:
        """Write an event of the first dropped steps of a run. `atoll status` counts them."""
        first = not any(other.dropped_steps for other in found.ranks.values())
        rank.dropped_steps = max(rank.dropped_steps, telemetry.dropped_steps)
        if first:
            cause = (
                f"measurements of {telemetry.dropped_steps} steps were dropped on their way to the controller. "
                "Training is not touched; plans rest on the steps that came. `atoll status` counts them"
            )
            warning = NewEvent(kind=EventKind.WORKER_NOTICE, level=Level.WARNING, rank=telemetry.id.rank, cause=cause)
            self._notice(found, warning)

    def schedulers_notice(self, job: str, run: int, text: str) -> None:
        """Write a notice of the strategy's scheduler. Ignored if the run is not current."""
        if (found := self.of(job, run)) is not None:
            self._notice(found, NewEvent(kind=EventKind.NOTICE, cause=text))

    @staticmethod
    def _notice(found: RunProgress, event: NewEvent) -> None:
        if len(found.notices) == KEPT_NOTICES:
            found.notices_dropped += 1
        found.notices.append(event)

    def _observe_notices(self, found: RunProgress, telemetry: agents_pb2.WorkerTelemetry) -> None:
        found.checkpoint_step = max(found.checkpoint_step, telemetry.checkpoint_step)
        found.memory_step = max(found.memory_step, telemetry.memory_step)
        for notice in telemetry.notices:
            level, rank = level_from_wire(notice.level), telemetry.id.rank
            self._notice(
                found, NewEvent(kind=EventKind.WORKER_NOTICE, level=level, rank=rank, cause=notice.text[:1000])
            )

    def take_notices(self, job: str, run: int) -> tuple[NewEvent, ...]:
        """Take the notices since the last call, at most KEPT_NOTICES, for the caller to write."""
        found = self.of(job, run)
        if found is None or not found.notices:
            return ()
        notices = tuple(found.notices)
        if found.notices_dropped:
            dropped = found.notices_dropped
            event = NewEvent(
                kind=EventKind.DROPPED, level=notices[0].level, count=dropped, cause="older notices were dropped"
            )
            notices = (event, *notices)
        found.notices.clear()
        found.notices_dropped = 0
        return notices
