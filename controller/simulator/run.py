"""One policy on one cluster: steps, telemetry, decisions and changes, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from atoll.controller.deciding.controller_half import controller_half
from atoll.controller.deciding.given import lead_steps
from atoll.controller.estimators.run import RunEstimators, StepEstimator
from atoll.controller.planners.batches.even import EvenInput, split_evenly
from atoll.controller.planners.batches.inverse_time import InverseTimeInput, TimedNode, split_by_inverse_time
from atoll.controller.simulator.cluster import Cluster, is_called
from atoll.controller.simulator.joining import Joining
from atoll.controller.simulator.learning import Learning, SampledNorms
from atoll.controller.simulator.links import Link
from atoll.controller.simulator.outcome import Outcome, PlanLog, Point
from atoll.controller.simulator.policies import Choice, SimulatedPolicy, Situation
from atoll.controller.simulator.ranks import Ranks
from atoll.controller.simulator.strategy_steps import Network, Params, numbers
from atoll.controller.simulator.telemetry import Telemetry

NORMS_EVERY: Final = 5
"""Steps between two whose gradients' norms are told."""


class Simulation:
    """Deterministic: the same cluster, policy and seed give the same outcome.

    Times, gradients and network draw from streams of their own, so two policies see the same noise in the same step as
    long as the same devices are there.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        policy: SimulatedPolicy,
        new_estimators: Callable[[StepEstimator | None], RunEstimators],
        seed: int,
    ) -> None:
        self._cluster, self._name, self._policy, self._new_estimators = cluster, name, policy, new_estimators
        self._times_rng, self._norms_rng, self._network_rng = (
            np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, stream]))) for stream in range(3)
        )
        scenario = cluster.scenario
        self._half = controller_half(scenario.strategy, scenario.strategy_settings.said())
        self._learning = Learning(scenario.learning.samples, cluster.initial_batch, scenario.learning.noise_scale)
        self._speeds = {device.name: device.speed for device in cluster.devices}
        self._links: dict[str, Link] = dict(cluster.links)
        self._changes = list(cluster.changes)
        self._now_s, self._step, self._samples, self._run = 0.0, 0, 0, 0
        self._ended = ""  # why, where it was not for the target
        self._learned: dict[str, float] = {}  # seconds per sample by device, in earlier runs
        self._joining = Joining(cluster)
        self._plans: list[PlanLog] = []
        self._points: list[Point] = []
        self._form(scenario.first_params(), scenario.total_batch)

    def run(self) -> Outcome:
        tell_s = self._cluster.scenario.decide_s
        while self._goes_on():
            self._change()
            self._one_step()
            if self._now_s >= tell_s:
                self._decide()
                tell_s = self._now_s + self._cluster.scenario.decide_s
        return Outcome(
            policy=self._name,
            ended=self._ended or "target reached",
            seconds=self._now_s,
            steps=self._step,
            progress=self._learning.progress,
            samples=self._samples,
            plans=tuple(self._plans),
            points=tuple(self._points),
            verdicts=tuple(self._joining.verdicts),
        )

    def _goes_on(self) -> bool:
        scenario = self._cluster.scenario
        if self._now_s >= scenario.max_s:
            self._ended = "max_s"
        elif self._step >= scenario.max_steps:
            self._ended = "max_steps"
        return not self._ended and self._learning.share < 1

    def _change(self) -> None:
        """What the scenario says of this time: speeds, links, and who is there."""
        while self._changes and self._changes[0].at_s <= self._now_s:
            change = self._changes.pop(0)
            if change.device is not None and change.speed is not None:
                called = (d.name for d in self._cluster.devices if is_called(d, change.device))
                self._speeds.update(dict.fromkeys(called, change.speed))
            elif change.island is not None and change.mbit_s is not None:
                self._links[change.island] = Link.constant(change.mbit_s)
        if self._joining.present(self._now_s) == self._ranks.devices:
            return
        for rank, known in self._telemetry.tell(self._now_s).ranks.items():
            self._learned[self._ranks.devices[rank].name] = known.compute_s / max(known.local_batch, 1)
        self._now_s += self._cluster.scenario.restart_s
        if not self._joining.present(self._now_s):  # the job waits for a device
            later = (d.joins_s for d in self._cluster.devices if d.joins_s > self._now_s)
            self._now_s = min(later, default=self._cluster.scenario.max_s)
        if self._joining.present(self._now_s):
            before = self._in_force.choice
            self._form(before.params, sum(before.batches))

    def _form(self, params: Params, total: int) -> None:
        """A new run with whoever is there."""
        self._run += 1
        self._ranks = Ranks(self._cluster, self._joining.present(self._now_s), self._now_s)
        self._telemetry = Telemetry(self._estimators(), self._ranks, self._cluster.entries)
        self._in_force = self._newest = self._log(1, self._first(params, total), self._step)
        self._take_effect()

    def _estimators(self) -> RunEstimators:
        return self._new_estimators(self._half.estimator() if self._half else None)

    def _first(self, params: Params, total: int) -> Choice:
        """By what was learned of all devices in earlier runs; else even."""
        times = [self._learned.get(device.name) for device in self._ranks.devices]
        known = tuple(seconds for seconds in times if seconds)
        if len(known) < len(times) or self._policy.splits_evenly:
            batches = split_evenly(EvenInput(total_batch=total, nodes=self._ranks.bounds)).batches
            return Choice(batches=batches, params=params, planner="even", reason="not all devices are known yet")
        nodes = tuple(
            TimedNode(seconds_per_sample=seconds, **dict(bounds))
            for seconds, bounds in zip(known, self._ranks.bounds, strict=True)
        )
        batches = split_by_inverse_time(InverseTimeInput(total_batch=total, nodes=nodes)).batches
        return Choice(batches=batches, params=params, planner="inverse-time", reason="learned in earlier runs")

    def _log(self, plan: int, choice: Choice, from_step: int) -> PlanLog:
        log = PlanLog(run=self._run, plan=plan, at_s=self._now_s, from_step=from_step, choice=choice)
        self._plans.append(log)
        return log

    def _take_effect(self) -> None:
        self._in_force = plan = self._newest
        for device, batch in zip(self._ranks.devices, plan.choice.batches, strict=True):
            if device.bounds.max_batch is not None and batch > device.bounds.max_batch:
                self._ended = f"out of memory: {device.name} got {batch} samples and holds {device.bounds.max_batch}"
        now = (self._speeds, Network(self._now_s, self._links))
        plan.exact_s = self._ranks.exact_s(plan.choice, *now)
        plan.optimum_s = self._ranks.optimum_s(sum(plan.choice.batches), *now)

    def _one_step(self) -> None:
        if self._newest is not self._in_force and self._newest.from_step <= self._step:
            self._take_effect()
        choice = self._in_force.choice
        computing, timed = self._ranks.step(
            choice,
            self._speeds,
            Network(self._now_s, self._links),
            times_rng=self._times_rng,
            network_rng=self._network_rng,
        )
        norms, extra = SampledNorms(np.zeros(len(choice.batches)), 0.0), self._ranks.extra(choice)
        if self._step % NORMS_EVERY == 0 and extra is None:
            norms = self._learning.norms(choice.batches, self._norms_rng)
        self._telemetry.measure(self._step, self._in_force, computing, timed, norms)
        total, step_s = sum(choice.batches), timed.ends_s - self._now_s
        self._now_s = timed.ends_s
        self._learning.step(total, extra)
        self._samples += total
        self._step += 1
        self._in_force.seconds.append(step_s)
        self._points.append(Point(self._now_s, self._learning.progress, step_s, total, numbers(choice.params)))

    def _decide(self) -> None:
        """All telemetry since the last time arrives, and the policy is asked."""
        profile = self._telemetry.tell(self._now_s)
        split = "even" if self._policy.splits_evenly else "auto"
        self._joining.assess(
            self._now_s, profile, self._ranks.devices, learned=self._learned, speeds=self._speeds, split=split
        )
        choice = self._policy.decide(
            Situation(
                now_s=self._now_s,
                planned_s=self._newest.at_s,
                run=self._run,
                plan=self._newest.plan,
                current=self._newest.choice,
                profile=profile,
                bounds=self._ranks.bounds,
                islands=self._ranks.island_of,
                initial_batch=self._cluster.initial_batch,
                candidates=self._cluster.candidates,
                rule=self._cluster.scenario.learning.rule,
                surrogate=self._cluster.surrogate,
            )
        )
        if choice is not None:
            self._newest = self._log(self._newest.plan + 1, choice, self._step - 1 + lead_steps(profile.step_s))
