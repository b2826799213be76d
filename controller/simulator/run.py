"""Simulation of one policy on one cluster: steps, telemetry, decisions and changes, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from atoll.controller.deciding.first import first_record
from atoll.controller.deciding.given import Given, Policy, controller_half, lead_steps
from atoll.controller.estimators.profile import Profile
from atoll.controller.estimators.run import RunEstimators, StepEstimator
from atoll.controller.jobs.admission.admitting import AdmissionQuestion, RatedDevice, answer
from atoll.controller.planners.batches.splits import (
    EvenInput,
    InverseTimeInput,
    TimedNode,
)
from atoll.controller.planners.registry import EVEN, INVERSE_TIME
from atoll.controller.simulator.cluster import Cluster, Link, SimulatedDevice
from atoll.controller.simulator.learning import Learning, SampledNorms
from atoll.controller.simulator.policies import SimulatedPolicy, chosen
from atoll.controller.simulator.report import Outcome, PlanLog, Point, Verdict, numbers
from atoll.controller.simulator.steps import Network, Ranks, StrategySteps
from atoll.controller.simulator.telemetry import Telemetry
from atoll.controller.state.records import PlanRecord
from atoll.strategies import registry
from atoll.strategies.declaration import load

NORMS_EVERY_STEPS: Final = 5
"""Steps between two whose gradients' norms are reported."""
ASSESS_EVERY_S: Final = 10.0
"""Seconds between two assessments of the devices that offer themselves, as in the controller."""


def simulate(cluster: Cluster, policies: Sequence[str], seed: int) -> Iterator[Outcome]:
    """Yield one outcome for each policy, in order. Raises BadInput, or NoFeasiblePlan where the batch does not fit."""
    for name, policy in zip(policies, chosen(policies, cluster.scenario), strict=True):
        yield Simulation(cluster, name, policy, seed).run()


class Simulation:
    """Deterministic run: the same cluster, policy and seed give the same outcome.

    Times, gradients and network draw from streams of their own. So two policies see the same noise in the same step as
    long as the same devices are there.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        policy: SimulatedPolicy,
        seed: int,
        new_estimators: Callable[[StepEstimator | None], RunEstimators] = RunEstimators,
    ) -> None:
        self._cluster, self._scenario = cluster, cluster.scenario
        self._name, self._policy, self._new_estimators = name, policy, new_estimators
        self._times_rng, self._norms_rng, self._network_rng = (
            np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, stream]))) for stream in range(3)
        )
        scenario, strategy = self._scenario, registry.find(cluster.scenario.strategy)
        self._new_steps: type[StrategySteps] = load(strategy.simulator)
        self._half = controller_half(strategy.name, scenario.strategy_settings.said())
        low, high = scenario.learning.batches or (scenario.total_batch, scenario.total_batch)
        self._allowed = Policy(
            split=policy.split,
            half=self._half,
            adapts=strategy.plan_parameters.adjustable() if policy.parameters else (),
            min_batch=low if policy.batch else 0,
            max_batch=high if policy.batch else 0,
            rule=scenario.learning.rule,
            initial_batch=cluster.initial_batch,
            surrogate=scenario.learning.extra,
        )
        self._learning = Learning(scenario.learning.samples, cluster.initial_batch, scenario.learning.noise_scale)
        self._speeds = {device.name: float(device.given.speed) for device in cluster.devices}
        self._links: dict[str, Link] = dict(cluster.links)
        self._changes = list(cluster.changes)
        self._now_s, self._step, self._samples, self._run = 0.0, 0, 0, 0
        self._ended = ""  # the reason, where it was not for the target
        self._seconds_per_sample: dict[str, float] = {}  # by device, in earlier runs
        self._admitted = {d.name for d in cluster.devices if d.given.joins_s == 0 or not scenario.admission}
        self._assessed_s = 0.0
        self._verdicts: list[Verdict] = []
        self._plans: list[PlanLog] = []
        self._points: list[Point] = []
        self._form(policy.first_params(scenario), scenario.total_batch)

    def run(self) -> Outcome:
        report_s = self._scenario.decide_s
        while self._continues():
            self._change()
            self._one_step()
            if self._now_s >= report_s:
                self._decide()
                report_s = self._now_s + self._scenario.decide_s
        return Outcome(
            policy=self._name,
            ended=self._ended or "target reached",
            seconds=self._now_s,
            steps=self._step,
            progress=self._learning.progress,
            samples=self._samples,
            plans=tuple(self._plans),
            points=tuple(self._points),
            verdicts=tuple(self._verdicts),
        )

    def _continues(self) -> bool:
        if self._now_s >= self._scenario.max_s:
            self._ended = "max_s"
        elif self._step >= self._scenario.max_steps:
            self._ended = "max_steps"
        return not self._ended and self._learning.share < 1

    def _change(self) -> None:
        """Apply the scenario's changes that are due, and begin a new run where other devices are there."""
        while self._changes and self._changes[0].at_s <= self._now_s:
            change = self._changes.pop(0)
            if change.device is not None and change.speed is not None:
                called = (device.name for device in self._cluster.devices if device.is_called(change.device))
                self._speeds.update(dict.fromkeys(called, change.speed))
            elif change.island is not None and change.mbit_s is not None:
                self._links[change.island] = Link.constant(change.mbit_s)
        if self._members() == self._ranks.devices:
            return
        for rank, known in self._telemetry.deliver(self._now_s).ranks.items():
            self._seconds_per_sample[self._ranks.devices[rank].name] = known.compute_s / max(known.local_batch, 1)
        self._now_s += self._scenario.restart_s
        if not self._members():  # the job waits for a device
            later = (d.given.joins_s for d in self._cluster.devices if d.given.joins_s > self._now_s)
            self._now_s = min(later, default=self._scenario.max_s)
        if self._members():
            self._form(self._in_force.record.strategy_params, sum(self._in_force.batches))

    def _present(self) -> list[SimulatedDevice]:
        return [device for device in self._cluster.devices if device.is_there(self._now_s)]

    def _members(self) -> tuple[SimulatedDevice, ...]:
        return tuple(device for device in self._present() if device.name in self._admitted)

    def _form(self, params: Mapping[str, Any], total: int) -> None:
        """Begin a new run with the devices that are there."""
        self._run += 1
        self._ranks = Ranks(self._members())
        self._steps = self._new_steps(self._cluster, self._ranks.island_of, self._now_s)
        estimators = self._new_estimators(self._half.estimator() if self._half else None)
        self._telemetry = Telemetry(estimators, self._ranks, self._cluster.entries)
        self._in_force = self._newest = self._log(self._first_plan(params, total), self._step)
        self._take_effect()

    def _first_plan(self, params: Mapping[str, Any], total: int) -> PlanRecord:
        """Split by what was learned of all devices in earlier runs, else evenly."""
        times = [self._seconds_per_sample.get(device.name) for device in self._ranks.devices]
        known = tuple(seconds for seconds in times if seconds)
        if len(known) < len(times) or self._policy.even:
            even = EVEN.decide(EvenInput(total_batch=total, nodes=self._ranks.bounds))
            first = first_record(self._run, even.plan.batches, even, "not all devices are known yet")
        else:
            nodes = tuple(
                TimedNode(seconds_per_sample=seconds, **dict(bounds))
                for seconds, bounds in zip(known, self._ranks.bounds, strict=True)
            )
            by_time = INVERSE_TIME.decide(InverseTimeInput(total_batch=total, nodes=nodes))
            first = first_record(self._run, by_time.plan.batches, by_time, "learned in earlier runs")
        earlier = self._newest.record.total_batch if self._plans else 0
        return replace(first, strategy_params=params, total_batch=earlier, learning_rate_factor=1.0)

    def _log(self, record: PlanRecord, from_step: int) -> PlanLog:
        batches = tuple(round(share) for share in record.shares)
        self._plans.append(PlanLog(record=record, batches=batches, at_s=self._now_s, from_step=from_step))
        return self._plans[-1]

    def _take_effect(self) -> None:
        self._in_force = plan = self._newest
        for device, batch in zip(self._ranks.devices, plan.batches, strict=True):
            if device.given.max_batch is not None and batch > device.given.max_batch:
                self._ended = f"out of memory: {device.name} got {batch} samples and holds {device.given.max_batch}"
        network, computing = Network(self._now_s, self._links), self._ranks.exact(plan.batches, self._speeds)
        plan.exact_s = self._steps.exact_s(computing, plan.record.strategy_params, network)
        if not self._ranks.saturates:  # the planner's model knows no such devices
            nodes = [device.model(self._speeds[device.name]) for device in self._ranks.devices]
            plan.optimum_s = self._steps.optimum_s(sum(plan.batches), nodes, network)

    def _one_step(self) -> None:
        if self._newest is not self._in_force and self._newest.from_step <= self._step:
            self._take_effect()
        plan, params = self._in_force, self._in_force.record.strategy_params
        computing = self._ranks.drawn(plan.batches, self._speeds, self._times_rng)
        timed = self._steps.step(computing, params, Network(self._now_s, self._links), self._network_rng)
        total = sum(plan.batches)
        norms, extra = SampledNorms(np.zeros(len(plan.batches)), 0.0), self._steps.extra(total, params)
        if self._step % NORMS_EVERY_STEPS == 0 and extra is None:
            norms = self._learning.norms(plan.batches, self._norms_rng)
        self._telemetry.measure(self._step, plan, computing, timed, norms)
        step_s = timed.ends_s - self._now_s
        self._now_s = timed.ends_s
        self._learning.step(total, extra)
        self._samples += total
        self._step += 1
        plan.seconds.append(step_s)
        self._points.append(Point(self._now_s, self._learning.progress, step_s, total, numbers(params)))

    def _decide(self) -> None:
        """Deliver the telemetry since the last time, and ask admission and policy."""
        profile = self._telemetry.deliver(self._now_s)
        self._assess_offers(profile)
        given = Given(
            now_s=self._now_s,
            planned_s=self._newest.at_s,
            current=self._newest.record,
            profile=profile,
            policy=self._allowed,
            islands=self._ranks.island_of,
            max_batches=tuple(bounds.max_batch or 0 for bounds in self._ranks.bounds),
        )
        plan = self._policy.decide(given, self._ranks.bounds, self._scenario)
        if plan is not None:
            self._newest = self._log(plan, self._step - 1 + lead_steps(profile.step_s))

    def _assess_offers(self, profile: Profile) -> None:
        """Admit the devices with which the run is predicted to be faster, by the controller's own admission."""
        offers = [device for device in self._present() if device.name not in self._admitted]
        if not offers or self._now_s < self._assessed_s + ASSESS_EVERY_S:
            return
        found = answer(
            AdmissionQuestion(
                profile=profile,
                workers=[self._rated(device) for device in self._ranks.devices],
                offers=[self._rated(device) for device in offers],
                learned=self._seconds_per_sample,
                split="even" if self._policy.even else "auto",
                batch_range=None,
                restart_s=self._scenario.restart_s,
            )
        )
        if found is None:
            return
        self._assessed_s = self._now_s
        self._admitted |= found.admitted.keys()
        self._verdicts += [Verdict(self._now_s, name, True, reason) for name, reason in found.admitted.items()]
        answered = {verdict.device for verdict in self._verdicts}
        waiting = [(name, reason) for name, reason in found.waiting.items() if name not in answered]
        self._verdicts += [Verdict(self._now_s, name, False, reason) for name, reason in waiting]

    def _rated(self, device: SimulatedDevice) -> RatedDevice:
        """Return an agent's measure of it by a fixed calculation: samples a second, without fixed seconds."""
        return RatedDevice(device.name, self._speeds[device.name] / (device.cost.q + device.cost.k))
