"""Cluster of a scenario: devices with costs, links with rates, changes in order of time.

A link has a constant rate, or a trace of `seconds,mbit_s` lines over and over."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.controller.planners.batches.optperf import NodeModel
from atoll.controller.planners.batches.water_filling import Bounds
from atoll.controller.simulator import presets
from atoll.controller.simulator.presets import Cost
from atoll.controller.simulator.scenario import MAX_DEVICES, ChangeSection, DeviceSection, Scenario
from atoll.errors import BadInput

ENTRY_BYTES: Final = 4
MAX_POINTS: Final = 100_000
BYTES_PER_MBIT: Final = 125_000.0


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A device of the scenario; `given` is the section that it comes from, perhaps with others."""

    name: str
    cost: Cost
    given: DeviceSection

    @property
    def bounds(self) -> Bounds:
        """Limits of its batch. The lower one is 1: an idle rank would never be measured again."""
        return Bounds(min_batch=1, max_batch=self.given.max_batch)

    def is_called(self, name: str) -> bool:
        """Tell whether this is the device's name, or that of its section."""
        return self.name == name or (self.name.startswith(f"{name}-") and self.name[len(name) + 1 :].isdigit())

    def is_there(self, now_s: float) -> bool:
        leaves_s = math.inf if self.given.leaves_s is None else self.given.leaves_s
        return self.given.joins_s <= now_s < leaves_s

    def model(self, speed: float) -> NodeModel:
        """Return the planners' model of it, which holds above `cost.floor`."""
        cost = self.cost
        return NodeModel(
            q=cost.q / speed, s=cost.s / speed, k=cost.k / speed, m=cost.m / speed, **dict(self.bounds)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """Rate over time: mbit_s[i] from starts_s[i] on, each way; after length_s it begins again."""

    starts_s: tuple[float, ...]
    mbit_s: tuple[float, ...]
    length_s: float

    @classmethod
    def constant(cls, mbit_s: float) -> Link:
        return cls((0.0,), (mbit_s,), math.inf)

    def at_mbit_s(self, now_s: float) -> float:
        return self.mbit_s[bisect_right(self.starts_s, self._inside(now_s)[1]) - 1]

    def ends_s(self, begin_s: float, size_bytes: float) -> float:
        """Return when this many bytes are through, if they begin at `begin_s` and are alone on the link."""
        round_s, inside_s = self._inside(begin_s)
        index = bisect_right(self.starts_s, inside_s) - 1
        left = size_bytes
        while True:
            until_s = self.starts_s[index + 1] if index + 1 < len(self.starts_s) else self.length_s
            bytes_s = self.mbit_s[index] * BYTES_PER_MBIT
            if left <= (until_s - inside_s) * bytes_s:
                return round_s + inside_s + left / bytes_s
            left -= (until_s - inside_s) * bytes_s
            inside_s, index = until_s, index + 1
            if index == len(self.starts_s):
                round_s, inside_s, index = round_s + self.length_s, 0.0, 0

    def _inside(self, now_s: float) -> tuple[float, float]:
        """Return when the present round of the trace began, and the seconds since then."""
        if math.isinf(self.length_s):
            return 0.0, now_s
        rounds, inside_s = divmod(now_s, self.length_s)
        return rounds * self.length_s, inside_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """entries: trained parameters of the model. changes: by time."""

    scenario: Scenario
    entries: int
    initial_batch: int
    devices: tuple[SimulatedDevice, ...]
    links: Mapping[str, Link]
    changes: tuple[ChangeSection, ...]


def build(scenario: Scenario, folder: Path) -> Cluster:
    """Return the scenario's cluster. folder: paths of traces are relative to it. Raises BadInput."""
    model = presets.named(scenario.model, presets.MODELS, "model") if scenario.model is not None else None
    devices, tensors = _devices(scenario), scenario.compression
    entries = scenario.entries or (sum(tensors.bytes_of_each) // ENTRY_BYTES if tensors else 0)
    batch = scenario.learning.initial_batch or (model.initial_batch if model else 0)
    return Cluster(
        scenario=scenario,
        entries=entries or (model.entries if model else 0),
        initial_batch=batch or scenario.total_batch,
        devices=devices,
        links=_links(scenario, devices, folder),
        changes=_changes(scenario, devices),
    )


def _devices(scenario: Scenario) -> tuple[SimulatedDevice, ...]:
    of_cluster = presets.named(scenario.cluster, presets.CLUSTERS, "cluster") if scenario.cluster is not None else {}
    sections = [*(DeviceSection(preset=name, count=count) for name, count in of_cluster.items()), *scenario.devices]
    if sum(section.count for section in sections) > MAX_DEVICES:
        raise BadInput(f"the scenario has more than {MAX_DEVICES} devices. Simulate fewer")
    found: list[SimulatedDevice] = []
    for number, section in enumerate(sections):
        base, cost = section.name or section.preset or f"device-{number}", _cost(section, scenario)
        names = [base] if section.count == 1 else [f"{base}-{index}" for index in range(section.count)]
        found += [SimulatedDevice(name, cost, section) for name in names]
    called = Counter(device.name for device in found)
    if twice := [name for name, count in called.items() if count > 1]:
        raise BadInput(f"two devices are called {twice[0]!r}. Give them names of their own, or one section with count")
    if all(device.given.joins_s > 0 for device in found):
        raise BadInput("no device is there at the start. Let one have joins_s = 0")
    return tuple(found)


def _cost(section: DeviceSection, scenario: Scenario) -> Cost:
    if section.preset is not None:
        if scenario.model is None:
            raise BadInput(f"device preset {section.preset!r} needs to know the model. Say model = 'resnet50', e.g.")
        return presets.cost(section.preset, scenario.model)
    if section.alpha is not None and section.beta is not None:
        return Cost.saturating(section.alpha, section.beta)
    return Cost(q=section.q or 0.0, s=section.s or 0.0, k=section.k or 0.0, m=section.m or 0.0)


def _links(scenario: Scenario, devices: tuple[SimulatedDevice, ...], folder: Path) -> dict[str, Link]:
    islands = {device.given.island for device in devices}
    if unknown := sorted(scenario.links.keys() - islands):
        raise BadInput(f"links.{unknown[0]}: no device is in that island. Islands: {', '.join(sorted(islands))}")
    if len(islands) > 1 and (missing := sorted(islands - scenario.links.keys())):
        raise BadInput(f"island {missing[0]!r} has no link. Add [links.{missing[0]}] with mbit_s or trace")
    return {
        island: read_trace(folder / link.trace) if link.trace else Link.constant(link.mbit_s or 0.0)
        for island, link in sorted(scenario.links.items())
    }


def _changes(scenario: Scenario, devices: tuple[SimulatedDevice, ...]) -> tuple[ChangeSection, ...]:
    for number, change in enumerate(scenario.changes):
        if change.device is not None and not any(device.is_called(change.device) for device in devices):
            presets.require(change.device, {device.name for device in devices}, f"device changes[{number}].device =")
        if change.island is not None:
            presets.require(change.island, scenario.links, f"link changes[{number}].island =")
    return tuple(sorted(scenario.changes, key=lambda change: change.at_s))


def read_trace(path: Path, hint: str = ". Its path is relative to the scenario") -> Link:
    """Read a CSV of `seconds,mbit_s` with a heading; seconds ascend from 0. The last point lasts like the one before.

    Raises BadInput naming file and line. hint: added to the message where there is no such file."""
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the trace {path} cannot be read: {error}{hint}") from error
    if not 3 <= len(rows) <= MAX_POINTS or rows[0] != ["seconds", "mbit_s"]:
        raise BadInput(f"the trace {path} must be a line `seconds,mbit_s` and 2 to {MAX_POINTS - 1} points after it")
    starts: list[float] = []
    rates: list[float] = []
    for number, row in enumerate(rows[1:], start=2):
        try:
            second, rate = map(float, row)
        except ValueError:
            second = rate = math.nan
        if not (second > starts[-1] if starts else second == 0) or not 1 <= rate <= 100_000 or math.isinf(second):
            raise BadInput(
                f"{path}, line {number}: {','.join(row)!r} is not a time that ascends from 0 and 1 to 100000 Mbit/s"
            )
        starts.append(second)
        rates.append(rate)
    return Link(tuple(starts), tuple(rates), 2 * starts[-1] - starts[-2])
