"""Cluster of a scenario: devices with costs, links with rates, changes in order of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.controller.simulator import presets
from atoll.controller.simulator.devices import Cost, SimulatedDevice
from atoll.controller.simulator.links import Link, read_trace
from atoll.controller.simulator.scenario import MAX_DEVICES, ChangeSection, DeviceSection, Scenario
from atoll.errors import BadInput

ENTRY_BYTES: Final = 4


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
