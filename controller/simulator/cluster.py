"""Builds what is simulated from a scenario: devices with costs, links with rates, changes in order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.controller.planners.batches.bounds import Bounds
from atoll.controller.planners.batches.goodput import candidates_between
from atoll.controller.planners.surrogate import Surrogate
from atoll.controller.simulator import presets
from atoll.controller.simulator.devices import Cost, SimulatedDevice
from atoll.controller.simulator.links import Link, read_trace
from atoll.controller.simulator.scenario import MAX_DEVICES, ChangeSection, DeviceSection, Scenario
from atoll.errors import BadInput

ENTRY_BYTES: Final = 4
CANDIDATES: Final = 50
"""Total batches that a policy with a range may choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """entries: of the model. candidates: total batches that a policy may choose from. changes: by time."""

    scenario: Scenario
    entries: int
    initial_batch: int
    candidates: tuple[int, ...]
    surrogate: Surrogate | None
    devices: tuple[SimulatedDevice, ...]
    links: Mapping[str, Link]
    changes: tuple[ChangeSection, ...]


def build(scenario: Scenario, folder: Path) -> Cluster:
    """folder: what paths of traces are relative to. Raises BadInput."""
    model = None
    if scenario.model is not None:
        presets.known(scenario.model, presets.MODELS, "model")
        model = presets.MODELS[scenario.model]
    devices = _devices(scenario)
    learning = scenario.learning
    low, high = learning.batches or (scenario.total_batch, scenario.total_batch)
    tensors = scenario.compression
    entries = scenario.entries or (sum(tensors.bytes_of_each) // ENTRY_BYTES if tensors else 0)
    return Cluster(
        scenario=scenario,
        entries=entries or (model.entries if model else 0),
        initial_batch=learning.initial_batch or (model.initial_batch if model else 0) or scenario.total_batch,
        candidates=candidates_between(low, high, CANDIDATES),
        surrogate=learning.extra,
        devices=devices,
        links=_links(scenario, devices, folder),
        changes=_changes(scenario, devices),
    )


def _devices(scenario: Scenario) -> tuple[SimulatedDevice, ...]:
    sections = list(scenario.devices)
    if scenario.cluster is not None:
        presets.known(scenario.cluster, presets.CLUSTERS, "cluster")
        alike = [DeviceSection(preset=name, count=count) for name, count in presets.CLUSTERS[scenario.cluster]]
        sections = alike + sections
    if sum(section.count for section in sections) > MAX_DEVICES:
        raise BadInput(f"the scenario has more than {MAX_DEVICES} devices. Simulate fewer")
    found: list[SimulatedDevice] = []
    for number, section in enumerate(sections):
        base = section.name or section.preset or f"device-{number}"
        cost = _cost(section, scenario)
        found += [
            _device(section, cost, base if section.count == 1 else f"{base}-{index}") for index in range(section.count)
        ]
    called = Counter(device.name for device in found)
    if twice := [name for name, count in called.items() if count > 1]:
        raise BadInput(f"two devices are called {twice[0]!r}. Give them names of their own, or one section with count")
    if all(device.joins_s > 0 for device in found):
        raise BadInput("no device is there at the start. Let one have joins_s = 0")
    return tuple(found)


def _device(section: DeviceSection, cost: Cost, name: str) -> SimulatedDevice:
    return SimulatedDevice(
        name=name,
        island=section.island,
        cost=cost,
        bounds=Bounds(min_batch=1, max_batch=section.max_batch),  # an idle rank would never be measured again
        noise=section.noise,
        spikes=section.spikes,
        spike_factor=section.spike_factor,
        speed=section.speed,
        dense_s=section.dense_s,
        joins_s=section.joins_s,
        leaves_s=math.inf if section.leaves_s is None else section.leaves_s,
    )


def _cost(section: DeviceSection, scenario: Scenario) -> Cost:
    if section.preset is not None:
        if scenario.model is None:
            raise BadInput(f"device preset {section.preset!r} needs to know the model. Say model = 'resnet50', e.g.")
        return presets.cost(section.preset, scenario.model)
    if section.alpha is not None and section.beta is not None:
        return Cost.saturating(section.alpha, section.beta)
    return Cost(q=section.q or 0.0, s=section.s or 0.0, k=section.k or 0.0, m=section.m or 0.0)


def _links(scenario: Scenario, devices: tuple[SimulatedDevice, ...], folder: Path) -> dict[str, Link]:
    islands = {device.island for device in devices}
    if unknown := sorted(scenario.links.keys() - islands):
        raise BadInput(f"links.{unknown[0]}: no device is in that island. Islands: {', '.join(sorted(islands))}")
    if len(islands) > 1 and (missing := sorted(islands - scenario.links.keys())):
        raise BadInput(f"island {missing[0]!r} has no link. Add [links.{missing[0]}] with mbit_s or trace")
    found = {}
    for island, link in sorted(scenario.links.items()):
        found[island] = read_trace(folder / link.trace) if link.trace else Link.constant(link.mbit_s or 0.0)
    return found


def _changes(scenario: Scenario, devices: tuple[SimulatedDevice, ...]) -> tuple[ChangeSection, ...]:
    for number, change in enumerate(scenario.changes):
        if change.device is not None and not any(is_called(device, change.device) for device in devices):
            presets.known(change.device, {device.name for device in devices}, f"device changes[{number}].device =")
        if change.island is not None:
            presets.known(change.island, scenario.links, f"link changes[{number}].island =")
    return tuple(sorted(scenario.changes, key=lambda change: change.at_s))


def is_called(device: SimulatedDevice, name: str) -> bool:
    """Its own name, or that of the section it came from with others."""
    return device.name == name or (device.name.startswith(f"{name}-") and device.name[len(name) + 1 :].isdigit())
