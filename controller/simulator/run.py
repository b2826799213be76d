"""One policy on one cluster: steps, telemetry, decisions and changes, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.controller.estimators.profile import Profile
from atoll.controller.estimators.seen import LinkSeen, StepSeen
from atoll.controller.planners.even import EvenInput, split_evenly
from atoll.controller.planners.inverse_time import InverseTimeInput, split_by_inverse_time
from atoll.controller.planners.optperf import NodeModel, OptPerfInput, plan_optperf, step_times
from atoll.controller.planners.optperf import Overlap as PlannedOverlap
from atoll.controller.planners.water_filling import F64
from atoll.controller.planners.wire_bytes import Traffic
from atoll.controller.simulator.cluster import Cluster, is_called
from atoll.controller.simulator.devices import Computing, Device, Devices
from atoll.controller.simulator.learning import Learning
from atoll.controller.simulator.links import Link
from atoll.controller.simulator.policies import Choice, Policy, Situation
from atoll.controller.simulator.rounds import (
    VALUE_BYTES,
    Overlapping,
    SparseRounds,
    Timed,
    dense_step,
    ring_overlap,
)

LEAD_STEPS: Final = 5
"""A plan holds from this many steps after the newest that was seen, as the controller has it."""
NORMS_EVERY: Final = 5
"""Steps between two whose gradients' norms are told."""


class Estimators(Protocol):
    """What the simulator needs of atoll.controller.estimators.run.RunEstimators; one for each run of a job."""

    def observe(self, rank: int, seen: StepSeen) -> None: ...

    def observe_links(
        self, rank: int, island_of: Mapping[int, str], links: Iterable[LinkSeen], now_s: float
    ) -> None: ...

    def observe_entries(self, entries: int) -> None: ...

    def profile(self) -> Profile: ...


@dataclass(slots=True, kw_only=True)
class PlanLog:
    """A plan and what came of it. exact_s: its step without noise when it came into force; optimum_s: that of the best
    split of the same total, 0 where it is not known; measured_s: median of its steps; run: how often ranks changed."""

    run: int
    plan: int
    at_s: float
    from_step: int
    choice: Choice
    exact_s: float = 0.0
    optimum_s: float = 0.0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Point:
    """Where a simulated job was at a time."""

    now_s: float
    progress: float
    step_s: float
    total_batch: int
    rate: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """reached: whether the target was, before max_s and max_steps."""

    policy: str
    reached: bool
    seconds: float
    steps: int
    progress: float
    samples: int
    plans: tuple[PlanLog, ...]
    points: tuple[Point, ...]


class Simulation:
    """Deterministic: the same cluster, policy and seed give the same outcome.

    Noise has streams of its own for times and for gradients, so two policies see the same noise in the same step as
    long as the same devices are there.
    """

    def __init__(
        self, cluster: Cluster, name: str, policy: Policy, new_estimators: Callable[[], Estimators], seed: int
    ) -> None:
        self._cluster, self._name, self._policy, self._new_estimators = cluster, name, policy, new_estimators
        self._times_rng, self._norms_rng, self._network_rng = (
            np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, stream]))) for stream in range(3)
        )
        learning = cluster.scenario.learning
        surrogate = cluster.surrogate if cluster.scenario.strategy == "stale-sparse" else None
        self._learning = Learning(learning.samples, cluster.initial_batch, learning.noise_scale, surrogate)
        self._speeds = {device.name: device.speed for device in cluster.devices}
        self._links: dict[str, Link] = dict(cluster.links)
        self._changes = list(cluster.changes)
        self._now_s, self._step, self._samples, self._run = 0.0, 0, 0, 0
        self._learned: dict[str, float] = {}
        self._plans: list[PlanLog] = []
        self._points: list[Point] = []

    def run(self) -> Outcome:
        scenario = self._cluster.scenario
        self._form(
            Choice(
                batches=(), rate=scenario.rate if scenario.strategy == "stale-sparse" else 0.0, planner="", reason=""
            ),
            scenario.total_batch,
        )
        tell_s = scenario.decide_s
        while self._goes_on():
            self._change()
            self._one_step()
            if self._now_s >= tell_s:
                self._tell()
                self._decide()
                tell_s = self._now_s + scenario.decide_s
        return Outcome(
            self._name,
            self._learning.share >= 1,
            self._now_s,
            self._step,
            self._learning.progress,
            self._samples,
            tuple(self._plans),
            tuple(self._points),
        )

    def _goes_on(self) -> bool:
        scenario = self._cluster.scenario
        return self._learning.share < 1 and self._now_s < scenario.max_s and self._step < scenario.max_steps

    def _present(self) -> tuple[Device, ...]:
        return tuple(d for d in self._cluster.devices if d.joins_s <= self._now_s < d.leaves_s)

    def _change(self) -> None:
        """What the scenario says of this time: speeds, links, and who is there."""
        while self._changes and self._changes[0].at_s <= self._now_s:
            change = self._changes.pop(0)
            if change.device is not None and change.speed is not None:
                for device in self._cluster.devices:
                    if is_called(device, change.device):
                        self._speeds[device.name] = change.speed
            elif change.island is not None and change.mbit_s is not None:
                self._links[change.island] = Link.constant(change.mbit_s)
        present = self._present()
        if not present:
            later = [d.joins_s for d in self._cluster.devices if d.joins_s > self._now_s]
            self._now_s = min(later, default=self._cluster.scenario.max_s)  # the job waits for a device
            present = self._present()
        if present and present != self._ranks.members:
            self._tell()
            for rank, known in self._estimators.profile().ranks.items():
                self._learned[self._ranks.members[rank].name] = known.compute_s / max(known.local_batch, 1)
            self._now_s += self._cluster.scenario.restart_s
            before = self._in_force
            self._form(before.choice, sum(before.choice.batches))

    def _form(self, before: Choice, total: int) -> None:
        """A new run with whoever is there."""
        self._run += 1
        present = self._present()
        self._ranks = Devices(present)
        self._bounds = tuple(device.bounds for device in present)
        self._islands = tuple(device.island for device in present)
        names = sorted(set(self._islands))
        self._island_N: NDArray[np.int64] = np.array([names.index(island) for island in self._islands])
        self._leaders = [self._islands.index(name) for name in names]
        self._island_of = dict(enumerate(self._islands))
        self._sent_J, self._busy_J = np.zeros(len(names)), np.zeros(len(names))
        self._estimators = self._new_estimators()
        self._estimators.observe_entries(self._cluster.entries)
        self._rounds = SparseRounds(self._island_N, names, self._now_s)
        self._seen: list[list[StepSeen]] = [[] for _ in present]
        self._pending: PlanLog | None = None
        self._plan(self._first(before, total), self._step)
        self._take_effect()

    def _first(self, before: Choice, total: int) -> Choice:
        """By what was learned of all devices in earlier runs, where the policy ever split unevenly; else even."""
        times = [self._learned.get(device.name) for device in self._ranks.members]
        if before.planner not in {"", "even", "adaptdl"} and all(times):
            known = tuple(seconds for seconds in times if seconds)
            split = split_by_inverse_time(InverseTimeInput(total, known, self._bounds))
            return replace(before, batches=split.batches, planner="inverse-time", reason="learned in earlier runs")
        batches = split_evenly(EvenInput(total, self._bounds)).batches
        return Choice(batches=batches, rate=before.rate, planner="even", reason="nothing is known yet")

    def _plan(self, choice: Choice, from_step: int) -> None:
        number = self._pending.plan if self._pending else self._in_force.plan if self._plans else 0
        if self._plans and self._plans[-1].run != self._run:
            number = 0
        self._pending = PlanLog(run=self._run, plan=number + 1, at_s=self._now_s, from_step=from_step, choice=choice)
        self._plans.append(self._pending)

    def _take_effect(self) -> None:
        if self._pending is not None and self._pending.from_step <= self._step:
            self._in_force, self._pending = self._pending, None
            self._in_force.exact_s, self._in_force.optimum_s = self._without_noise(self._in_force.choice)

    def _speed_N(self) -> F64:
        return np.array([self._speeds[device.name] for device in self._ranks.members])

    def _overlap(self, noise: float) -> Overlapping:
        given = self._cluster.scenario.overlap
        if given.t_o is not None and given.t_u is not None:
            return Overlapping(given.gamma, given.t_o * noise, given.t_u * noise)
        ranks, names = len(self._islands), set(self._islands)
        mbit_s = min(self._links[name].at_mbit_s(self._now_s) for name in names) if len(names) > 1 else given.mbit_s
        return ring_overlap(
            given.gamma,
            entries=self._cluster.entries,
            bucket_bytes=given.bucket_mib * 2**20,
            ranks=ranks,
            mbit_s=mbit_s,
            noise=noise,
        )

    def _one_step(self) -> None:
        self._take_effect()
        choice, scenario = self._in_force.choice, self._cluster.scenario
        computing = self._ranks.drawn(choice.batches, self._speed_N(), self._times_rng)
        if scenario.strategy == "dense":
            sigma = scenario.overlap.noise
            noise = math.exp(sigma * self._network_rng.standard_normal() - sigma**2 / 2)
            timed = dense_step(computing, self._overlap(noise), self._now_s, len(self._leaders))
        else:
            timed = self._rounds.step(computing, self._links, self._cluster.entries, choice.rate)
        self._see(choice, computing, timed)
        step_s = timed.ends_s - self._now_s
        self._now_s = timed.ends_s
        total = sum(choice.batches)
        self._learning.step(total, choice.rate)
        self._in_force.seconds.append(step_s)
        self._points.append(Point(self._now_s, self._learning.progress, step_s, total, choice.rate))
        self._samples += total
        self._step += 1

    def _see(self, choice: Choice, computing: Computing, timed: Timed) -> None:
        """What every rank would measure of this step."""
        sampled = self._step % NORMS_EVERY == 0
        norm_N, mean_norm = np.zeros(len(choice.batches)), 0.0
        if sampled:
            norm_N, mean_norm = self._learning.norms(choice.batches, self._norms_rng)
        self._sent_J += timed.sent_J
        self._busy_J += timed.busy_J
        sent_N = np.zeros(len(choice.batches))
        sent_N[self._leaders] = timed.sent_J
        total, dense = sum(choice.batches), self._cluster.scenario.strategy == "dense"
        rows = zip(
            choice.batches,
            *(
                column.tolist()
                for column in (
                    timed.step_N,
                    computing.all_N,
                    computing.before_N,
                    computing.backward_N,
                    timed.first_bucket_N,
                    timed.sync_N,
                    timed.last_sync_N,
                    timed.stall_N,
                    sent_N,
                    norm_N,
                )
            ),
            strict=True,
        )
        for rank, (batch, step, compute, before, backward, first, sync, last, stall, sent, norm) in enumerate(rows):
            self._seen[rank].append(
                StepSeen(
                    step=self._step,
                    plan=self._in_force.plan,
                    local_batch=batch,
                    total_batch=total,
                    step_s=step,
                    compute_s=compute,
                    load_s=0.1 * before,
                    forward_s=0.8 * before,
                    backward_s=backward,
                    first_bucket_s=first,
                    update_s=0.1 * before,
                    sync_s=sync,
                    last_sync_s=last,
                    stall_s=stall,
                    rate=choice.rate,
                    sent_bytes=round(sent),
                    local_sqnorm=norm if dense else 0.0,
                    global_sqnorm=mean_norm if dense else 0.0,
                )
            )

    def _tell(self) -> None:
        """The telemetry since the last time, as agents send it: rank by rank."""
        for rank, seen in enumerate(self._seen):
            for step in seen:
                self._estimators.observe(rank, step)
            seen.clear()
        others = len(self._leaders) - 1
        for j, leader in enumerate(self._leaders):
            if others and self._sent_J[j] > 0:
                links = [
                    LinkSeen(peer=peer, sent_bytes=round(self._sent_J[j] / others), busy_s=float(self._busy_J[j]))
                    for peer in self._leaders
                    if peer != leader
                ]
                self._estimators.observe_links(leader, self._island_of, links, self._now_s)

    def _decide(self) -> None:
        newest = self._pending or self._in_force
        learning = self._cluster.scenario.learning
        choice = self._policy.decide(
            Situation(
                now_s=self._now_s,
                newest_step=self._step - 1,
                plan=newest.plan,
                current=newest.choice,
                profile=self._estimators.profile(),
                bounds=self._bounds,
                islands=self._islands,
                entries=self._cluster.entries,
                initial_batch=self._cluster.initial_batch,
                candidates=self._cluster.candidates,
                rule=learning.rule,
                surrogate=self._cluster.surrogate,
                samples=self._learning.target - self._learning.progress,
            )
        )
        if choice is not None:
            self._plan(choice, self._step - 1 + LEAD_STEPS)

    def _without_noise(self, choice: Choice) -> tuple[float, float]:
        """Seconds of a step without noise, and of the best split of the same total (0 where that is not known)."""
        speed_N, total = self._speed_N(), sum(choice.batches)
        computing = self._ranks.exact(choice.batches, speed_N)
        if self._cluster.scenario.strategy != "dense":
            bandwidth_J = np.array(
                [
                    self._links[n].at_mbit_s(self._now_s) * 125_000 if n in self._links else math.inf
                    for n in self._names()
                ]
            )
            part_J = np.bincount(self._island_N) / len(self._islands)
            sends_s = Traffic(self._cluster.entries, VALUE_BYTES, part_J, bandwidth_J).seconds(1 - choice.rate)
            return max(float(computing.all_N.max()), sends_s), 0.0
        overlap = self._overlap(1.0)
        exact_s = dense_step(computing, overlap, 0.0, len(self._leaders)).ends_s
        if any(device.cost.floor for device in self._ranks.members):
            return exact_s, 0.0
        nodes = self._truth(speed_N)
        planned = PlannedOverlap(overlap.gamma, overlap.t_o, overlap.t_u)
        best = plan_optperf(OptPerfInput(total, nodes, planned)).batches
        return exact_s, float(step_times(nodes, planned).at(np.array(best, dtype=np.float64)).max())

    def _truth(self, speed_N: F64) -> tuple[NodeModel, ...]:
        return tuple(device.model(speed) for device, speed in zip(self._ranks.members, speed_N.tolist(), strict=True))

    def _names(self) -> list[str]:
        return sorted(set(self._islands))
