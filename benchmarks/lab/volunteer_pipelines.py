"""Pipelines of devices that join and leave, in simulated time: by the rules of `volunteer`, SWARM and DAPPLE.

All rules have the same stages, from planner `allocation`, the same links and the same losses. A batch's micro-batches
pass the stages one after the other, both passes at once. A device computes one thing at a time and its link carries one
thing at a time each way, beside computing."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from atoll.controller.planners.pipelines.allocation import AllocatedStage, plan_allocation
from atoll.errors import BadInput
from atoll.host.documents import did_you_mean
from lab.volunteer_scenario import F64, VolunteerCluster, VolunteerScenario

POLICIES: Final = {
    "volunteer": "each micro-batch split by what members answer, a task pool, gradients handed over on the way",
    "swarm": "each micro-batch whole to whom it is done soonest; what a lost device did of the batch is redone",
    "dapple": "each micro-batch split evenly; as swarm, and each loss stops the pipeline for restart_s",
    "alone": "the reliable devices, without volunteers",
}


@dataclass(frozen=True, slots=True)
class VolunteerOutcome:
    """batch_s: of each batch. lost: devices lost, over all batches. redone: share of the work that was done twice."""

    policy: str
    stages: tuple[AllocatedStage, ...]
    batch_s: tuple[float, ...]
    lost: int
    redone: float


def simulate(scenario: VolunteerScenario, policies: Sequence[str], seed: int) -> Iterator[VolunteerOutcome]:
    """Yield one outcome for each policy, all with losses at the same part of a batch. Raises BadInput for an unknown
    policy, NoFeasiblePlan."""
    for name in policies:
        if name not in POLICIES:
            raise BadInput(f"no policy {name!r} for volunteers. {did_you_mean(name, POLICIES)}")
    every = VolunteerCluster.of(scenario, seed)
    for name in policies:
        cluster = every.reliable() if name == "alone" else every
        stages = plan_allocation(cluster.allocation(scenario)).stages
        yield _outcome(scenario, cluster, stages, name, seed)


def _outcome(
    scenario: VolunteerScenario, cluster: VolunteerCluster, stages: tuple[AllocatedStage, ...], name: str, seed: int
) -> VolunteerOutcome:
    never_N = np.full(len(cluster.power_N), np.inf)
    undisturbed_s = Batch(scenario, cluster, stages, never_N).run(name)  # losses come at a part of it
    draw = np.random.default_rng([seed, 2])
    batch_s, lost, redone = [], 0, 0.0
    batches = scenario.batches if scenario.disconnect and not cluster.reliable_N.all() else 1  # all are alike else
    for _ in range(batches):
        leaves_N = (draw.random(len(never_N)) < scenario.disconnect) & ~cluster.reliable_N
        at_N = np.where(leaves_N, draw.random(len(never_N)) * undisturbed_s, np.inf)
        batch = Batch(scenario, cluster, stages, at_N, undisturbed_s)
        batch_s.append(batch.run(name))
        lost += int(leaves_N.sum())
        redone += batch.redone
    return VolunteerOutcome(name, stages, tuple(batch_s), lost, redone / batches)


@dataclass(slots=True)
class _Member:
    """Device of one stage. Seconds of a whole micro-batch: micro_s to compute it, link_s on its link, delay_s for its
    way there and back. deliver_s: seconds that the gradients of the stage's parameters are on the link."""

    device: int
    micro_s: float
    link_s: float
    delay_s: float
    deliver_s: float
    deliver_every: float = math.inf
    computed_s: float = 0.0  # computes until then
    carried_s: float = 0.0
    found_lost_s: float = math.inf  # the others know its loss from then on
    undelivered: list[tuple[float, float]] = field(default_factory=list)  # (share of a micro-batch, when it was done)
    since: float = 0.0  # micro-batches since it delivered

    @property
    def rate(self) -> float:
        """Micro-batches a second that it answers."""
        return 1 / max(self.micro_s, self.link_s, 1e-12)

    def would_end_s(self, share: float, ready_s: float) -> float:
        arrived_s = max(ready_s, self.carried_s) + share * self.link_s
        return max(arrived_s + self.delay_s, self.computed_s) + share * self.micro_s

    def take(self, share: float, ready_s: float) -> float:
        end_s = self.would_end_s(share, ready_s)
        self.carried_s = max(ready_s, self.carried_s) + share * self.link_s
        self.computed_s = end_s
        return end_s


class Batch:
    """Simulation of one batch, with all its micro-batches."""

    def __init__(
        self,
        scenario: VolunteerScenario,
        cluster: VolunteerCluster,
        stages: tuple[AllocatedStage, ...],
        lost_N: F64,
        undisturbed_s: float = math.inf,
    ) -> None:
        """lost_N: when each device is lost, infinite where it stays."""
        self._scenario, self._cluster, self._stages, self._lost_N = scenario, cluster, stages, lost_N
        self._calm_s = undisturbed_s
        self._micro_bytes = scenario.batch / scenario.micro_batches * scenario.activation_bytes
        self.redone = 0.0
        """Share of the batch's work that was done again."""

    def run(self, policy: str) -> float:
        """Return the seconds until each sample's gradient is there, in every stage."""
        relayed = policy in {"volunteer", "alone"}
        stages = [self._members(k, relayed) for k in range(len(self._stages))]
        pass_by = {"dapple": self._evenly, "swarm": self._whole}.get(policy, self._by_rate)
        between_s = [0.0] * len(stages)
        in_flight = 2 * (sum(map(len, stages)) if policy == "swarm" else len(stages))
        ends_s: deque[float] = deque(maxlen=in_flight)
        end_s = 0.0
        for _ in range(self._scenario.micro_batches):
            ready_s = ends_s[0] if len(ends_s) == in_flight else 0.0
            for k, members in enumerate(stages):
                ready_s = self._sent_on(k, ready_s, between_s) if relayed else ready_s
                ready_s = pass_by(members, ready_s)
            ends_s.append(ready_s)
            end_s = max(end_s, ready_s)
        for members in stages:
            end_s = max(end_s, self._redo_undelivered(members))
        if policy == "dapple":
            end_s += self._scenario.restart_s * int(np.isfinite(self._lost_N).sum())
            end_s += max(self._all_reduce_s(k) for k in range(len(stages)))
        return end_s

    def _members(self, k: int, relayed: bool) -> list[_Member]:
        """Return the members of a stage. relayed: volunteers get activations from a frontal server and send them to a
        backward one; else each gets them from the devices of the stage before."""
        stage = self._stages[k]
        servers = sorted({*stage.frontal, *stage.backward})
        devices = [*servers, *stage.clients]
        layers = stage.layers[1] - stage.layers[0] + 1
        cost = layers * self._scenario.layer_cost * self._scenario.batch / self._scenario.micro_batches
        gradient_bytes = self._scenario.parameter_bytes * layers / self._scenario.layers
        found = []
        for i in devices:
            if relayed:
                ways = [] if i in servers else [self._nearest(i, stage.frontal), self._nearest(i, stage.backward)]
            else:
                ways = [self._mean(i, self._devices(k - 1))] if k else []
            per_byte = sum(1 / bandwidth for _, bandwidth in ways)
            deliver_s = gradient_bytes / ways[0][1] if relayed and ways else 0.0
            member = _Member(
                i,
                cost / float(self._cluster.power_N[i]),
                self._micro_bytes * per_byte,
                2 * sum(delay for delay, _ in ways),
                deliver_s,
            )
            found.append(member)
        rates = sum(one.rate for one in found)
        for one in found:
            one.deliver_every = self._delivers_every(one, rates) if relayed else math.inf
        return found

    def _delivers_every(self, member: _Member, rates: float) -> float:
        """Return its own micro-batches between two deliveries: those whose loss costs as much as a delivery.

        Source: Young (1974)."""
        if member.device not in self._volunteers or not self._scenario.disconnect or math.isinf(self._calm_s):
            return 0.0 if member.device not in self._volunteers else math.inf
        interval_s = math.sqrt(2 * member.deliver_s * self._calm_s / self._scenario.disconnect)
        return interval_s * member.rate / rates / (self._calm_s / self._scenario.micro_batches)

    @property
    def _volunteers(self) -> frozenset[int]:
        return frozenset(int(i) for i in np.flatnonzero(~self._cluster.reliable_N))

    def _devices(self, k: int) -> list[int]:
        stage = self._stages[k]
        return sorted({*stage.frontal, *stage.backward, *stage.clients})

    def _nearest(self, i: int, servers: Sequence[int]) -> tuple[float, float]:
        delay_NN, bandwidth_NN = self._cluster.delay_NN, self._cluster.bandwidth_NN
        j = min(servers, key=lambda one: delay_NN[i, one] + self._micro_bytes / bandwidth_NN[i, one])
        return float(delay_NN[i, j]), float(bandwidth_NN[i, j])

    def _mean(self, i: int, others: Sequence[int]) -> tuple[float, float]:
        """Return delay and bandwidth of the mean way from one of the others."""
        delay = float(self._cluster.delay_NN[i, others].mean())
        return delay, float(1 / (1 / self._cluster.bandwidth_NN[i, others]).mean())

    def _sent_on(self, k: int, ready_s: float, between_s: list[float]) -> float:
        """Move a micro-batch from the backward servers of the stage before, in even parts for the frontal servers."""
        if not k:
            return ready_s
        ways = [self._nearest(i, self._stages[k - 1].backward) for i in self._stages[k].frontal]
        carry_s = max(self._micro_bytes / len(ways) / bandwidth for _, bandwidth in ways)
        between_s[k] = max(ready_s, between_s[k]) + carry_s
        return between_s[k] + 2 * max(delay for delay, _ in ways)

    def _by_rate(self, members: list[_Member], ready_s: float) -> float:
        present = [one for one in members if ready_s < one.found_lost_s]
        rates = sum(one.rate for one in present)
        return max(self._computed_by(members, one, one.rate / rates, ready_s) for one in present)

    def _evenly(self, members: list[_Member], ready_s: float) -> float:
        present = [one for one in members if ready_s < one.found_lost_s]
        return max(self._computed_by(members, one, 1 / len(present), ready_s) for one in present)

    def _whole(self, members: list[_Member], ready_s: float) -> float:
        present = [one for one in members if ready_s < one.found_lost_s]
        soonest = min(present, key=lambda one: (one.would_end_s(1.0, ready_s), one.device))
        return self._computed_by(members, soonest, 1.0, ready_s)

    def _computed_by(self, members: list[_Member], member: _Member, share: float, ready_s: float) -> float:
        """Return when it is done: by the member, or after its loss by the device that is ready soonest."""
        lost_s = float(self._lost_N[member.device])
        end_s = member.take(share, ready_s)
        if end_s <= lost_s:
            self._delivered(member, share, end_s)
            return end_s
        deadline_s = ready_s + self._scenario.deadline * (end_s - ready_s)
        member.found_lost_s = min(member.found_lost_s, max(deadline_s, lost_s))
        return self._redo(members, share, max(ready_s, member.found_lost_s))

    def _delivered(self, member: _Member, share: float, end_s: float) -> None:
        member.undelivered.append((share, end_s))
        member.since += share
        if member.since < member.deliver_every:
            return
        member.carried_s = max(member.carried_s, end_s) + member.deliver_s
        member.since = 0.0
        if member.carried_s <= self._lost_N[member.device]:
            member.undelivered.clear()

    def _redo(self, members: list[_Member], share: float, at_s: float) -> float:
        present = [one for one in members if at_s < min(one.found_lost_s, self._lost_N[one.device])]
        soonest = min(present, key=lambda one: (one.would_end_s(share, at_s), one.device))
        self.redone += share / self._scenario.micro_batches / len(self._stages)
        return self._computed_by(members, soonest, share, at_s)

    def _redo_undelivered(self, members: list[_Member]) -> float:
        end_s = 0.0
        for member in members:
            lost_s = float(self._lost_N[member.device])
            if math.isinf(lost_s):
                continue
            found_s = member.found_lost_s if math.isfinite(member.found_lost_s) else lost_s
            undelivered, member.undelivered = member.undelivered, []
            for share, _ in undelivered:
                end_s = max(end_s, self._redo(members, share, found_s))
        return end_s

    def _all_reduce_s(self, k: int) -> float:
        """Return the seconds of a ring over the devices of the stage, after the batch."""
        devices = self._devices(k)
        if len(devices) == 1:
            return 0.0
        layers = self._stages[k].layers[1] - self._stages[k].layers[0] + 1
        slowest = min(float(self._cluster.bandwidth_NN[i, j]) for i in devices for j in devices if i != j)
        stage_bytes = self._scenario.parameter_bytes * layers / self._scenario.layers
        return 2 * (len(devices) - 1) / len(devices) * stage_bytes / slowest


COLUMNS: Final = ("POLICY", "STAGES", "BATCH", "LONGEST", "LOST", "REDONE", "AGAINST FIRST")


def rows(outcomes: Sequence[VolunteerOutcome]) -> list[list[str]]:
    """Return the table's rows; docs/simulator.md says what the columns mean."""
    means = [statistics.fmean(one.batch_s) for one in outcomes]
    return [
        [
            one.policy,
            str(len(one.stages)),
            f"{mean:.1f} s",
            f"{max(one.batch_s):.1f} s",
            f"{one.lost / len(one.batch_s):.1f}",
            f"{100 * one.redone:.1f} %",
            f"{means[0] / mean:.2f}",
        ]
        for one, mean in zip(outcomes, means, strict=True)
    ]
