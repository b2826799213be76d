"""Group nodes into islands by the links that their agents measured.

An island is a group of nodes that all-reduce with each other at the speed of a local network. A link counts by its
worse direction. Clusters of nodes are merged, the closest first. The distance of a link is the time of a message of M
bytes,

    d = rtt + M / bandwidth

Two clusters are merged if the lower median of the links between them is as good as a local network, and not clearly
worse than inside the clusters:

    bandwidth >= MIN_BANDWIDTH_BPS and bandwidth >= MIN_BANDWIDTH_SHARE * (the best of the medians inside both)
    rtt <= MAX_RTT_S and (rtt <= NEAR_RTT_S or rtt <= MAX_RTT_FACTOR * (the larger of the medians inside both))

A slow local network counts as well: a link of at least SLOW_LAN_BANDWIDTH_BPS and at most NEAR_RTT_S, if a third
cluster is measured that is FAR_RTT_FACTOR times as far and beyond NEAR_RTT_S, with less bandwidth. Without one, thin
links do not tell a slow local network from sites.

Hysteresis: between nodes that were together before, every bound is easier by STAY_FACTOR. Between nodes that were apart
it is harder by the same factor. So a node moves only on a clear change.

Four facts come before measurements. An operator's name wins: nodes of one name are one island, and nodes of two names
never share one. Nodes of one host are one island, unless a link inside the host is measured below HOST_BANDWIDTH_BPS or
beyond HOST_RTT_S: then a limit was set there, and its nodes are judged like machines. A node behind NAT joins only
nodes behind NAT of its own host. A node without a measured link is an island until it has one."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Annotated, Final, NamedTuple, Self

from pydantic import Field, model_validator

from atoll.planning.schemas import MAX_NODES, Name, Schema, Seconds

MESSAGE_BITS: Final = 8 * 2**22
"""Message whose time orders links, in bits: a bucket of gradients."""
MIN_BANDWIDTH_BPS: Final = 200e6
"""Least bandwidth inside an island. A gradient of 25 million parameters takes 4 s over such a link."""
MIN_BANDWIDTH_SHARE: Final = 0.25
"""Least bandwidth of a link that joins two clusters, as a share of the bandwidth inside them."""
SLOW_LAN_BANDWIDTH_BPS: Final = 50e6
"""Least bandwidth of a local network whose links are thin for gradients, but better than those to other sites."""
FAR_RTT_FACTOR: Final = 5.0
MAX_RTT_S: Final = 5e-3
NEAR_RTT_S: Final = 1.5e-3
"""Round-trip time of a local network. Below it, differences are noise of the machines."""
MAX_RTT_FACTOR: Final = 5.0
"""Largest round-trip time between two clusters beyond NEAR_RTT_S, as a multiple of that inside them."""
STAY_FACTOR: Final = 1.5
HOST_BANDWIDTH_BPS: Final = 1e9
HOST_RTT_S: Final = 1e-3

Bandwidth = Annotated[float, Field(gt=0, le=1e15)]


class IslandNode(Schema):
    """host: the same for all nodes under one kernel; empty if not known. nat: no other island can dial the node.
    island: the name that an operator gave; empty if none."""

    name: Name
    host: Annotated[str, Field(max_length=512)] = ""
    nat: bool = False
    island: Annotated[str, Field(max_length=256)] = ""


class NodePair(Schema):
    """A measured link. from_node sends bandwidth_bps bits a second to to_node. back_bps: the other direction, if it was
    measured with it."""

    from_node: Name
    to_node: Name
    rtt_s: Seconds
    bandwidth_bps: Bandwidth
    back_bps: Bandwidth | None = None


class IslandsInput(Schema):
    """previous: by node, the island that it was in by measurement."""

    nodes: Annotated[tuple[IslandNode, ...], Field(min_length=1, max_length=MAX_NODES)]
    pairs: tuple[NodePair, ...]
    previous: Mapping[str, str] = {}

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = {node.name for node in self.nodes}
        if len(names) != len(self.nodes):
            raise ValueError("two nodes have the same name")
        for number, pair in enumerate(self.pairs):
            for end in ("from_node", "to_node"):
                if getattr(pair, end) not in names:
                    raise ValueError(f"pairs[{number}].{end} = {getattr(pair, end)!r} is not among the nodes")
        return self


@dataclass(frozen=True, slots=True)
class Island:
    """reason: why these nodes are one island, or why the node is alone. settled: an operator, the host, NAT or a
    measurement decided it; False while the node has no measured link."""

    name: str
    nodes: tuple[str, ...]
    reason: str
    settled: bool


@dataclass(frozen=True, slots=True)
class IslandsPlan:
    islands: tuple[Island, ...]


class _WorseDirection(NamedTuple):
    bps: float
    rtt_s: float

    @property
    def distance_s(self) -> float:
        return self.rtt_s + MESSAGE_BITS / self.bps

    def __str__(self) -> str:
        return f"{mbit(self.bps)} and {ms(self.rtt_s)}"


def mbit(bps: float) -> str:
    return f"{float(f'{bps / 1e6:.2g}'):g} Mbit/s"


def ms(seconds: float) -> str:
    return f"{float(f'{1e3 * seconds:.2g}'):g} ms"


def _typical(links: Sequence[_WorseDirection]) -> _WorseDirection:
    """Return the lower median bandwidth and the median round-trip time."""
    return _WorseDirection(median_low(one.bps for one in links), median(one.rtt_s for one in links))


@dataclass(slots=True)
class _NodeCluster:
    nodes: list[str]
    name: str = ""
    """An operator's name."""
    alone: str = ""
    """Why it merges with no other cluster; empty if it may."""
    inside: list[_WorseDirection] = field(default_factory=list)
    of_host: bool = False


def plan_islands(given: IslandsInput) -> IslandsPlan:
    """Group the nodes. Islands come by name, their nodes by name."""
    links = _symmetric(given.pairs)
    grouping = _IslandGrouping(given, links)
    grouping.merge()
    return IslandsPlan(_named(given.previous, grouping))


def _symmetric(pairs: Iterable[NodePair]) -> dict[tuple[str, str], _WorseDirection]:
    """Return the worse direction of each measured pair, by its nodes in order. Of repeated ones the last counts."""
    directed: dict[tuple[str, str], _WorseDirection] = {}
    for pair in pairs:
        directed[pair.from_node, pair.to_node] = _WorseDirection(pair.bandwidth_bps, pair.rtt_s)
        if pair.back_bps is not None:
            directed[pair.to_node, pair.from_node] = _WorseDirection(pair.back_bps, pair.rtt_s)
    found: dict[tuple[str, str], _WorseDirection] = {}
    for (a, b), link in directed.items():
        if a != b:
            back = directed.get((b, a), link)
            found[min(a, b), max(a, b)] = _WorseDirection(min(link.bps, back.bps), max(link.rtt_s, back.rtt_s))
    return found


class _IslandGrouping:
    """Clusters and the measured links between them. A merged cluster keeps the number of the larger one."""

    def __init__(self, given: IslandsInput, links: Mapping[tuple[str, str], _WorseDirection]) -> None:
        self._previous = given.previous
        self.clusters: dict[int, _NodeCluster] = dict(enumerate(_first_clusters(given.nodes, links)))
        self._between: dict[int, dict[int, list[_WorseDirection]]] = {number: {} for number in self.clusters}
        of = {node: number for number, cluster in self.clusters.items() for node in cluster.nodes}
        for (a, b), link in sorted(links.items()):
            if of[a] == of[b]:
                cluster = self.clusters[of[a]]
                bps = min(link.bps, HOST_BANDWIDTH_BPS) if cluster.of_host else link.bps
                cluster.inside.append(_WorseDirection(bps, link.rtt_s))
                continue
            for x, y in ((of[a], of[b]), (of[b], of[a])):
                self._between[x].setdefault(y, []).append(link)

    def merge(self) -> None:
        """Merge the closest clusters until none may be merged."""
        waiting = [entry for x in self.clusters for y in self._between[x] if x < y for entry in self._entry(x, y)]
        heapq.heapify(waiting)
        changes: Counter[int] = Counter()
        while waiting:
            _, x, y, version = heapq.heappop(waiting)
            if x not in self.clusters or y not in self.clusters or version != (changes[x], changes[y]):
                continue
            if self._refusal(x, y):
                continue
            if len(self.clusters[x].nodes) < len(self.clusters[y].nodes):
                x, y = y, x
            self._absorb(x, y)
            changes[x] += 1
            for other in self._between[x]:
                low, high = min(x, other), max(x, other)
                for distance_s, *_ in self._entry(low, high):
                    heapq.heappush(waiting, (distance_s, low, high, (changes[low], changes[high])))

    def _entry(self, x: int, y: int) -> list[tuple[float, int, int, tuple[int, int]]]:
        if self.clusters[x].alone or self.clusters[y].alone:
            return []
        return [(_typical(self._between[x][y]).distance_s, x, y, (0, 0))]

    def _absorb(self, x: int, y: int) -> None:
        kept, gone = self.clusters[x], self.clusters.pop(y)
        kept.nodes += gone.nodes
        kept.name = kept.name or gone.name
        kept.inside += gone.inside + self._between[x].pop(y)
        kept.of_host = False
        neighbours = self._between.pop(y)
        del neighbours[x]
        for other, links in neighbours.items():
            del self._between[other][y]
            joined = self._between[x].setdefault(other, [])
            joined += links
            self._between[other][x] = joined

    def _refusal(self, x: int, y: int) -> str:
        """Return why two clusters with measured links stay apart; empty if they belong together."""
        one, other = self.clusters[x], self.clusters[y]
        if one.name and other.name:
            return "the operator named both"
        if alone := one.alone or other.alone:
            return f"one of both is {alone}"
        link, ease = _typical(self._between[x][y]), self._ease(one.nodes, other.nodes)
        inside = [_typical(cluster.inside) for cluster in (one, other) if cluster.inside]
        least_bps = MIN_BANDWIDTH_BPS / ease
        if link.bps < least_bps and not self._is_slow_lan(x, y, link, ease):
            return f"an island needs {mbit(least_bps)}"
        fastest_bps = max((each.bps for each in inside), default=0.0)
        if link.bps < MIN_BANDWIDTH_SHARE / ease * fastest_bps:
            return f"too thin beside {mbit(fastest_bps)} inside"
        near_s = max((each.rtt_s for each in inside), default=MAX_RTT_S)
        most_s = min(MAX_RTT_S, max(NEAR_RTT_S, MAX_RTT_FACTOR * near_s)) * ease
        return f"an island has at most {ms(most_s)}" if link.rtt_s > most_s else ""

    def _is_slow_lan(self, x: int, y: int, link: _WorseDirection, ease: float) -> bool:
        """Return whether a thin link is near, and that to a third cluster is thinner and far."""
        if link.bps < SLOW_LAN_BANDWIDTH_BPS / ease or link.rtt_s > NEAR_RTT_S * ease:
            return False
        others = [_typical(links) for each in (x, y) for z, links in self._between[each].items() if z not in (x, y)]
        far_s = max(NEAR_RTT_S, FAR_RTT_FACTOR * link.rtt_s) / ease
        return any(other.rtt_s > far_s and other.bps / ease < link.bps for other in others)

    def _ease(self, ones: Sequence[str], others: Sequence[str]) -> float:
        """Return the factor of hysteresis: above 1 if most pairs of nodes were together, below 1 if they were apart."""
        before, after = (Counter(self._previous[n] for n in nodes if n in self._previous) for nodes in (ones, others))
        pairs, together = before.total() * after.total(), sum(count * after[name] for name, count in before.items())
        if not pairs or 2 * together == pairs:
            return 1.0
        return STAY_FACTOR if 2 * together > pairs else 1 / STAY_FACTOR

    def reason(self, number: int, names: Mapping[int, str]) -> tuple[str, bool]:
        """Return the reason of an island in words, and whether it is settled."""
        cluster, parts = self.clusters[number], []
        if cluster.name:
            parts.append("named by the operator")
        if cluster.alone:
            parts.append(cluster.alone)
        if cluster.of_host:
            parts.append("all on one host")
        elif cluster.inside:
            parts.append(f"{_typical(cluster.inside)} between its nodes")
        apart = [(_typical(links), other) for other, links in self._between[number].items()]
        if apart:
            link, other = min(apart, key=lambda each: (each[0].distance_s, names[each[1]]))
            parts.append(f"{names[other]} is the nearest other with {link}: {self._refusal(number, other)}")
        return "; ".join(parts) or "no link of it is measured yet", bool(parts)


def _first_clusters(
    nodes: Sequence[IslandNode], links: Mapping[tuple[str, str], _WorseDirection]
) -> list[_NodeCluster]:
    """Group by the facts that come before measurements."""
    by_name: dict[str, _NodeCluster] = {}
    by_host: dict[tuple[str, bool], list[IslandNode]] = defaultdict(list)
    host_of = {node.name: node.host for node in nodes}
    limited = {
        host_of[a]
        for (a, b), link in links.items()
        if host_of[a] and host_of[a] == host_of[b]
        and (link.bps < HOST_BANDWIDTH_BPS or link.rtt_s > HOST_RTT_S)
    }  # fmt: skip
    alone = []
    for node in sorted(nodes, key=lambda one: one.name):
        if node.island:
            by_name.setdefault(node.island, _NodeCluster([], node.island)).nodes.append(node.name)
        elif node.host and (node.nat or node.host not in limited):
            by_host[node.host, node.nat].append(node)
        else:
            alone.append(_NodeCluster([node.name], alone="behind NAT" if node.nat else ""))
    named_on: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        if node.island and not node.nat:
            named_on[node.host].add(node.island)
    for (host, nat), members in by_host.items():
        names = [node.name for node in members]
        if not nat and len(named_on[host]) == 1:
            by_name[next(iter(named_on[host]))].nodes += names
            continue
        why = "behind NAT" if nat else ""
        alone.append(_NodeCluster(names, alone=why, of_host=len(names) > 1))
    return [*by_name.values(), *alone]


def _named(previous: Mapping[str, str], grouping: _IslandGrouping) -> tuple[Island, ...]:
    """Name each island as its operator did, or as most of its nodes' island was called before. Name others "lan-N",
    and a node behind NAT by its own name."""
    clusters = grouping.clusters
    names = {number: cluster.name for number, cluster in clusters.items() if cluster.name}
    taken = set(names.values())
    wishes = sorted(
        (-count, name, min(cluster.nodes), number)
        for number, cluster in clusters.items()
        if number not in names
        for name, count in Counter(previous[node] for node in cluster.nodes if node in previous).items()
    )
    for _, name, _, number in wishes:
        if number not in names and name not in taken:
            names[number] = name
            taken.add(name)
    for number in sorted(clusters.keys() - names.keys(), key=lambda each: min(clusters[each].nodes)):
        node = min(clusters[number].nodes)
        names[number] = node if clusters[number].alone and node not in taken else free_name(taken)
        taken.add(names[number])
    made = []
    for number, cluster in clusters.items():
        reason, settled = grouping.reason(number, names)
        made.append(Island(names[number], tuple(sorted(cluster.nodes)), reason, settled))
    return tuple(sorted(made, key=lambda island: island.name))


def free_name(taken: Iterable[str]) -> str:
    """Return the first of "lan-1", "lan-2", … that is not taken."""
    names = set(taken)
    return next(name for name in (f"lan-{number}" for number in range(1, len(names) + 2)) if name not in names)
