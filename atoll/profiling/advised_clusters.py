"""Clusters for `atoll advise`: the controller's nodes with measured links, or links that a user gave."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import Final

from atoll.controller.jobs.model.peer_links import PeerLink, PeerLinks
from atoll.controller.planners.strategy_choice.facts import IslandLink
from atoll.profiling.advice import AdvisedCluster, WorkerSeat, bandwidth_words
from atoll.v1.common_pb2 import Device
from atoll.v1.jobs_pb2 import Node

SHOWN_LINKS: Final = 6
SAME_DEVICE: Final = "every worker has a device of its own, as fast as this machine's"


def by_hand(workers: int, link: tuple[float, float] | None, islands: int) -> AdvisedCluster:
    """Return a cluster of equal workers. link: bits a second and round trip between islands; None: there is one."""
    count = min(islands, workers) if link is not None else 1
    places = tuple(WorkerSeat(f"island-{1 + rank * count // workers}") for rank in range(workers))
    if link is None:
        fast = "links are so fast that they cost nothing: no controller answered, and no --bandwidth was given"
        return AdvisedCluster(places=places, assumed=(SAME_DEVICE, fast))
    return AdvisedCluster(
        places=places,
        links=_all_links({place.island for place in places}, link),
        assumed=(SAME_DEVICE, f"{link_words(link)} between islands, as given; links inside an island cost nothing"),
    )


def of_nodes(
    nodes: Sequence[Node], workers: int, kind: str, own_rate: float, link: tuple[float, float] | None
) -> AdvisedCluster:
    """Return the fastest devices of the cluster, of one kind. own_rate: benchmark of the device that was measured, 0 if
    unknown. link: by hand, in place of measured links."""
    found = [
        (device.work_per_s, node.name, node.island, device.kind, f"{node.name}/{device.index}", _memory(node, device))
        for node in nodes
        if node.connected and not node.volunteer
        for device in node.devices
    ]
    if not any(one[3] == kind for one in found):
        kind = Counter(one[3] for one in found).most_common(1)[0][0]
    chosen = sorted((one for one in found if one[3] == kind), key=lambda one: (-one[0], one[1]))[:workers]
    known = own_rate > 0 and all(rate > 0 for rate, *_ in chosen)
    seats = tuple(
        WorkerSeat(island, rate / own_rate if known else 1.0, name, memory_bytes)
        for rate, _, island, _, name, memory_bytes in chosen
    )
    missing = workers - len(seats)
    seats += tuple(seats[at % len(seats)] for at in range(missing))
    measured = [f"speeds of {len(chosen)} devices, by the agents' benchmark against this machine's"] if known else []
    assumed = [] if known else [SAME_DEVICE]
    if missing > 0:
        assumed.append(f"{missing} workers more than the cluster has devices, as fast and as linked as those")
    islands: dict[str, set[str]] = defaultdict(set)
    for _, node, island, *_ in chosen:
        islands[island].add(node)
    links, inside, words = _links(nodes, islands) if link is None else (_all_links(islands, link), {}, "")
    if link is not None:
        assumed.append(f"{link_words(link)} between islands, as given")
    elif words:
        measured.append(words)
    if any(len(names) > 1 for name, names in islands.items() if name not in inside) or missing > 0:
        assumed.append("links inside an island that agents did not measure cost nothing")
    return AdvisedCluster(places=seats, links=links, inside=inside, measured=tuple(measured), assumed=tuple(assumed))


def _memory(node: Node, device: Device) -> int:
    """Return the bytes of memory of a device; of a CPU its part of the node's."""
    return device.memory_bytes if device.kind == "cuda" else node.memory_bytes // len(node.devices)


def _links(
    nodes: Sequence[Node], islands: Mapping[str, set[str]]
) -> tuple[tuple[IslandLink, ...], dict[str, tuple[float, float]], str]:
    """Return the links between islands and inside them, as agents measured them, and words about them."""
    peers = PeerLinks(
        {
            (node.name, link.node): PeerLink(link.rtt_s, link.bandwidth_bps, link.measured_unix_s)
            for node in nodes
            for link in node.links
            if link.bandwidth_bps >= 1
        }
    )
    between, inside, words = [], {}, []
    for source, target in permutations(sorted(islands), 2):
        if (found := peers.between(islands[source], islands[target])) is None:
            continue
        between.append(IslandLink(source=source, target=target, bandwidth_bps=found.bandwidth_bps, rtt_s=found.rtt_s))
        words.append(f"{source} to {target} {link_words((found.bandwidth_bps, found.rtt_s))}")
    for island, names in islands.items():
        if (found := peers.between(names, names)) is not None:
            inside[island] = (found.bandwidth_bps, found.rtt_s)
    shown = ", ".join(words[:SHOWN_LINKS]) + (", ..." if len(words) > SHOWN_LINKS else "")
    return tuple(between), inside, f"links by agents: {shown}" if shown else ""


async def own_rate(kind: str) -> float:
    """Return this machine's benchmark, as its agent would measure it; 0 if it cannot be measured."""
    from atoll.agent.telemetry.devices import find_devices
    from atoll.agent.telemetry.work import measured

    devices = [device for device in find_devices() if device.kind == kind][:1]
    if not devices:
        return 0.0
    (device,) = await measured(devices, None, asyncio.Event())
    return device.work_per_s


def link_words(link: tuple[float, float]) -> str:
    """Return '100 Mbit/s and 40 ms'."""
    return f"{bandwidth_words(link[0])} and {link[1] * 1000:.3g} ms"


def _all_links(islands: Iterable[str], link: tuple[float, float]) -> tuple[IslandLink, ...]:
    bandwidth_bps, rtt_s = link
    return tuple(
        IslandLink(source=source, target=target, bandwidth_bps=bandwidth_bps, rtt_s=rtt_s)
        for source, target in permutations(sorted(islands), 2)
    )
