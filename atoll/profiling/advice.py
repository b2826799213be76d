"""Advice before a run: what each strategy would take for a script, from a short measurement and the cluster's links.

A worker's step takes `fixed_s + per_sample_s * samples` on this machine, and that over the device's relative rate
elsewhere. The batch is split so that all workers take equally long:

    T = (B * per_sample_s + n * fixed_s) / sum(rate_i)        samples_i = (T * rate_i - fixed_s) / per_sample_s

Planner `strategy` predicts the rest. Everything but `measured` is pure."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from atoll.controller.deciding.strategy_candidates import candidates
from atoll.controller.planners.strategy_choice.facts import (
    IslandLink,
    MeasuredIsland,
    RankTimes,
    StrategyInput,
)
from atoll.controller.planners.strategy_choice.strategy import PredictedStrategy, StrategyPlan, plan_strategy
from atoll.errors import BadInput
from atoll.profiling import trials
from atoll.profiling.trials import Command, Trial, WorkerReport
from atoll.strategies import registry

FASTER: Final = tuple(1.25**power for power in range(1, 42))
"""Factors on the links' bandwidth that are tried for another choice, up to 10,000."""
BUSY: Final = 0.5
"""Load of a core from which other work makes times too long."""
HELPS: Final = 0.95
"""Share of the best time below which it helps to leave an island out."""
STATE_BYTES: Final = 4
"""Bytes an entry that a strategy keeps beside model, gradient and optimizer: residuals, or shared parameters."""
STATELESS: Final = ("gradients", "nonzeros")
"""Kinds of exchange that keep nothing from step to step."""
NO_LINK: Final = ("a measured link: wait for the agents' measurements, or give --bandwidth and --rtt",)
NOT_COMPARED: Final = "its steps cannot be compared with those of the others; choose it by --strategy"


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """compute_s: median seconds of a step of so many samples. error: relative median deviation. peak_bytes: memory."""

    samples: int
    compute_s: float
    error: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredScript:
    """A script, as one worker on this machine measured it. timed: by samples, ascending; empty if the script trains by
    none of the strategies that can be compared. busy: what else this machine did meanwhile; empty for nothing."""

    batch: int
    entries: int
    tensors: int
    gradient_density: float
    device: str
    refused: Mapping[str, str]
    timed: tuple[TimedBatch, ...]
    busy: str = ""

    @property
    def line(self) -> tuple[float, float]:
        """Return seconds of a step without samples, and of each sample. Neither is negative."""
        least, most = self.timed[0], self.timed[-1]
        if least.samples == most.samples:
            return 0.0, most.compute_s / most.samples
        per_sample_s = (most.compute_s - least.compute_s) / (most.samples - least.samples)
        per_sample_s = min(max(per_sample_s, 0.0), most.compute_s / most.samples)
        return most.compute_s - per_sample_s * most.samples, per_sample_s

    @property
    def error(self) -> float:
        """Return the relative error of a step's computing time."""
        return max((one.error for one in self.timed), default=0.0)

    def peak_bytes(self, samples: float) -> int:
        """Return the memory of a step of so many samples, not less than what was measured for fewer."""
        least, most = self.timed[0], self.timed[-1]
        if least.samples == most.samples:
            return most.peak_bytes
        slope = max(most.peak_bytes - least.peak_bytes, 0) / (most.samples - least.samples)
        return max(round(most.peak_bytes + slope * (samples - most.samples)), least.peak_bytes)


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """A device for a worker. rate: its speed, as a multiple of the measured device's. memory_bytes: 0 if unknown."""

    island: str
    rate: float = 1.0
    name: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedCluster:
    """Places of the workers, and the directed links between their islands. inside: bits a second between nodes of an
    island, and the round trip in seconds, where that is known. assumed: sentences about what was not measured."""

    places: tuple[WorkerSeat, ...]
    links: tuple[IslandLink, ...] = ()
    inside: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def islands(self) -> tuple[str, ...]:
        return tuple(sorted({place.island for place in self.places}))

    def without(self, island: str) -> AdvisedCluster:
        """Return the cluster without an island."""
        return replace(
            self,
            places=tuple(place for place in self.places if place.island != island),
            links=tuple(link for link in self.links if island not in (link.source, link.target)),
        )

    def with_faster_links(self, factor: float) -> AdvisedCluster:
        faster = (link.model_copy(update={"bandwidth_bps": link.bandwidth_bps * factor}) for link in self.links)
        return replace(self, links=tuple(faster))


@dataclass(frozen=True, slots=True)
class AdvisedStrategy:
    """A strategy for the script. The numbers are None if it is refused. ratio: time to a loss, relative to the best.
    memory_bytes: at least, of the worker with the most samples."""

    name: str
    predicted: PredictedStrategy | None
    ratio: float | None
    memory_bytes: int | None
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """strategies: the best first, those that are refused last. helps: what would make training faster. careful: why
    numbers may be wrong, or a run may fail."""

    script: MeasuredScript
    cluster: AdvisedCluster
    samples: tuple[int, ...]
    strategies: tuple[AdvisedStrategy, ...]
    chosen: str
    reason: str
    helps: tuple[str, ...]
    careful: tuple[str, ...]


def measured(command: Command, workers: int, progress: Callable[[int], None] = lambda _: None) -> MeasuredScript:
    """Measure the script in one worker on this machine, for so many workers. Raises as `trials.run`."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="atoll-advise-") as folder:
        (report,) = trials.run(command, Trial(workers=1, timed_for=workers), Path(folder), progress)
    if report.script is None:
        raise BadInput(f"{command.script} called run.prepare and reported nothing. Its output: {command.log(0)}")
    found = script_of(report)
    if load > BUSY * cores:
        found = replace(
            found, busy=f"this machine had other work (load {load:.1f} on {cores} cores): times are too long"
        )
    if not found.timed and comparable(found):
        raise BadInput(
            f"{command.script} ended before enough steps were timed ({len(report.timed)}). Let it train for more "
            f"epochs. Its output: {command.log(0)}"
        )
    return found


def comparable(script: MeasuredScript) -> bool:
    """Return True if the script allows a strategy whose steps can be compared."""
    return any(strategy.exchange and name not in script.refused for name, strategy in registry.strategies().items())


def script_of(report: WorkerReport) -> MeasuredScript:
    """Read a trial's report."""
    assert report.prepared is not None
    assert report.script is not None
    described = trials.description_of(report.prepared)
    return MeasuredScript(
        batch=int(report.prepared["batch"]),
        entries=described["entries"],
        tensors=int(report.script["tensors"]),
        gradient_density=1.0 if report.gradient_density is None else report.gradient_density,
        device=str(report.script["device"]),
        refused=dict(report.script["refused"]),
        timed=_timed(report.timed),
    )


def _timed(steps: Sequence[Mapping[str, Any]]) -> tuple[TimedBatch, ...]:
    by_batch: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for step in steps:
        by_batch[int(step["batch"])].append(step)
    found = []
    for samples, of_batch in sorted(by_batch.items()):
        times_s = [float(step["compute_s"]) for step in of_batch]
        middle_s = statistics.median(times_s)
        deviation_s = statistics.median(abs(one - middle_s) for one in times_s)
        peak = max(int(step["peak_bytes"]) for step in of_batch)
        if middle_s > 0:
            found.append(TimedBatch(samples, middle_s, deviation_s / middle_s, peak))
    return tuple(found)


def split(script: MeasuredScript, places: Sequence[WorkerSeat]) -> tuple[int, ...]:
    """Split the script's batch so that all workers compute equally long; each has at least one sample."""
    fixed_s, per_sample_s = script.line
    rates = [place.rate for place in places]
    if per_sample_s <= 0 or script.batch < len(places):
        even = max(1, script.batch // len(places))
        return (even,) * len(places)
    step_s = (script.batch * per_sample_s + len(places) * fixed_s) / math.fsum(rates)
    wanted = [max((step_s * rate - fixed_s) / per_sample_s, 1.0) for rate in rates]
    scale = script.batch / math.fsum(wanted)
    return tuple(max(1, round(one * scale)) for one in wanted)


def planner_input(script: MeasuredScript, cluster: AdvisedCluster) -> StrategyInput:
    """Return what planner `strategy` takes for this script in this cluster."""
    fixed_s, per_sample_s = script.line
    ranks: dict[str, list[RankTimes]] = defaultdict(list)
    for place, samples in zip(cluster.places, split(script, cluster.places), strict=True):
        compute_s = (fixed_s + per_sample_s * samples) / place.rate
        ranks[place.island].append(RankTimes(compute_s=compute_s, batch=samples))
    islands = []
    for name in cluster.islands:
        bandwidth_bps, rtt_s = cluster.inside.get(name, (None, 0.0))
        islands.append(MeasuredIsland(name=name, ranks=tuple(ranks[name]), bandwidth_bps=bandwidth_bps, rtt_s=rtt_s))
    return StrategyInput(
        islands=tuple(islands),
        links=cluster.links,
        entries=script.entries,
        gradient_density=script.gradient_density,
        candidates=candidates(script.refused),
        uncertainty=min(script.error, 1.0),
    )


def advise(script: MeasuredScript, cluster: AdvisedCluster) -> Advice:
    """Compare the strategies that the script allows."""
    if not comparable(script):
        return Advice(
            script=script,
            cluster=cluster,
            samples=(),
            strategies=tuple(_refused(name, script) for name in registry.strategies()),
            chosen="",
            reason="the script allows no strategy whose steps can be compared",
            helps=(),
            careful=(),
        )
    plan, samples = plan_strategy(planner_input(script, cluster)), split(script, cluster.places)
    by_name = {one.name: one for one in plan.candidates}
    compared = [one for one in plan.candidates if one.time_s is not None]
    best_s = min((one.time_s for one in compared if one.time_s is not None), default=math.nan)
    memory = script.peak_bytes(max(samples))
    strategies = []
    for name, strategy in registry.strategies().items():
        one = by_name.get(name)
        if one is None or one.time_s is None:
            strategies.append(_refused(name, script, one.refused if one is not None else ""))
            continue
        keeps = strategy.exchange is not None and strategy.exchange.kind not in STATELESS
        needed = memory + (STATE_BYTES * script.entries if keeps else 0)
        strategies.append(AdvisedStrategy(name, one, one.time_s / best_s, needed, ""))
    strategies.sort(key=lambda one: math.inf if one.ratio is None else one.ratio)
    return Advice(
        script=script,
        cluster=cluster,
        samples=samples,
        strategies=tuple(strategies),
        chosen=plan.strategy,
        reason=plan.reason,
        careful=(*([script.busy] if script.busy else []), *_without_room(script, cluster, samples)),
        helps=NO_LINK if not compared else (*_faster_link(script, cluster, plan), *_left_out(script, cluster, plan)),
    )


def _without_room(script: MeasuredScript, cluster: AdvisedCluster, samples: Sequence[int]) -> list[str]:
    """Return the devices whose memory does not hold the measured step with their part of the batch."""
    found = []
    for seat, part in zip(cluster.places, samples, strict=True):
        needed = script.peak_bytes(part)
        if 0 < seat.memory_bytes < needed:
            has = f"{seat.name} has {seat.memory_bytes / 1e9:.3g} GB of memory"
            found.append(f"{has}, and a worker with {part} samples takes at least {needed / 1e9:.3g} GB")
    return found


def _refused(name: str, script: MeasuredScript, why: str = "") -> AdvisedStrategy:
    return AdvisedStrategy(name, None, None, None, script.refused.get(name) or why or NOT_COMPARED)


def _time_s(plan: StrategyPlan) -> float:
    """Return the time of the chosen strategy; infinite if nothing could be compared."""
    found = next(one for one in plan.candidates if one.name == plan.strategy).time_s
    return math.inf if found is None else found


def _faster_link(script: MeasuredScript, cluster: AdvisedCluster, plan: StrategyPlan) -> list[str]:
    """Return from which bandwidth between the islands on whole gradients are as good as anything."""
    default = registry.default().name
    if not cluster.links or plan.strategy == default or default in script.refused:
        return []
    thinnest_bps = min(link.bandwidth_bps for link in cluster.links)
    for factor in FASTER:
        if plan_strategy(planner_input(script, cluster.with_faster_links(factor))).strategy == default:
            return [f"from {bandwidth_words(thinnest_bps * factor)} between islands on, {default} is the best"]
    return [f"{default} is not the best at any bandwidth between the islands: round trips take too long"]


def _left_out(script: MeasuredScript, cluster: AdvisedCluster, plan: StrategyPlan) -> list[str]:
    """Return the island without which the others would be the fastest with the whole batch, if it helps."""
    if len(cluster.islands) < 2:
        return []
    rest = {name: plan_strategy(planner_input(script, cluster.without(name))) for name in cluster.islands}
    island = min(rest, key=lambda name: _time_s(rest[name]))
    without_s, now_s = _time_s(rest[island]), _time_s(plan)
    if not without_s < HELPS * now_s < math.inf:
        return []
    return [f"without island {island}: {now_s / without_s:.2g}× faster, by {rest[island].strategy}"]


def bandwidth_words(bps: float) -> str:
    """Return '250 Mbit/s'."""
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bps >= unit:
            return f"{bps / unit:.3g} {name}"
    return f"{bps:.3g} bit/s"
