"""The NUMA nodes of this machine, its devices among them, and which of them a worker keeps to.

A worker whose device hangs on one NUMA node copies from memory of another through the link between the two, at half of
the rate and beside everybody else's copies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.agent.telemetry.devices import Device

_NODES: Final = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class NumaBinding:
    """NUMA node and processors of a worker. Memory comes from that node while it has some."""

    node: int
    cpus: tuple[int, ...]
    """All of the node that the agent may use, ascending: workers of one node and their loaders share them."""
    threads: int
    """This worker's part of them."""


def bindings(nodes: Mapping[int, Collection[int]], devices: Sequence[Device]) -> dict[int, NumaBinding]:
    """Return the bindings of devices by index. nodes: the processors of each NUMA node that the agent may use.

    Empty with one node, or with one device, which gets all processors. A device is left out if its node is unknown
    or has no processor for the agent."""
    there = {node: tuple(sorted(cpus)) for node, cpus in nodes.items() if cpus}
    if len(there) < 2 or len(devices) < 2:
        return {}
    on_node = Counter(device.numa_node for device in devices)
    return {
        device.index: NumaBinding(
            device.numa_node, there[device.numa_node], max(1, len(there[device.numa_node]) // on_node[device.numa_node])
        )
        for device in devices
        if device.numa_node is not None and device.numa_node in there
    }


def read_nodes(folder: Path = _NODES) -> dict[int, frozenset[int]]:
    """Return the processors of each NUMA node that this process may use; empty if the kernel does not list any."""
    allowed = os.sched_getaffinity(0)
    found = {}
    for node in folder.glob("node[0-9]*"):
        cpus = {int(cpu.name.removeprefix("cpu")) for cpu in node.glob("cpu[0-9]*")}
        found[int(node.name.removeprefix("node"))] = frozenset(cpus & allowed)
    return found
