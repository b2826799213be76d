"""Chooses the pairs of nodes whose links are measured, and when. Pure.

Up to MAX_FULL_MESH nodes measure all pairs. Of more nodes, each measures O(log n) others: those at distances of powers
of two in an order that mixes sites, and one node of each of the largest islands. So a cluster of 1,000 agents makes
about 20,000 measurements, not a million. A node takes part in one measurement at a time, and measurements take at most
a stated share of its time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MAX_FULL_MESH: Final = 12
"""Nodes of which all pairs are measured."""
MAX_ISLANDS_SEEN: Final = 16
"""Islands of which each node measures a member."""
REMEASURE_S: Final = 300.0
WATCH_S: Final = 10.0
"""Least time between two measurements of a pair on which workers train: a link that falls shows within seconds."""
CONFIRM_S: Final = 5.0
"""Pause after a first reading, or one that differs from the reading before, until the next confirms it."""
IDLE_SHARE: Final = 0.8
"""Largest share of time in which the links of an idle node are measured, or of one with a pair without a reading: its
first measurements are few."""
TRAINING_SHARE: Final = 0.02
"""The same of a node with workers."""
IDLE_BURST_S: Final = 0.3
TRAINING_BURST_S: Final = 0.1
FAILED_S: Final = 5.0
"""Pause after a failed measurement of a pair. It doubles with each failure in a row, up to REMEASURE_S."""

MAX_FIRST_FAILURES: Final = 2
"""Failures in a row after which no run waits for a pair's first measurement."""

Pair = tuple[str, str]
"""Two nodes, in the order of their names."""


class MeasurableNode(NamedTuple):
    """A connected node. dialled: other nodes can reach its probe. trains: workers are there. local: the address is one
    of its own machine alone. free_s: when it may take part in a measurement."""

    name: str
    island: str
    host: str
    dialled: bool
    trains: bool
    local: bool
    free_s: float


@dataclass(frozen=True, slots=True)
class PairHistory:
    """measured_s: when the pair was last measured; doubtful: no second reading confirms it; failures: in a row, since
    then; tried_s: when the last one ended."""

    measured_s: float = -math.inf
    doubtful: bool = False
    failures: int = 0
    tried_s: float = -math.inf

    @property
    def has_outcome(self) -> bool:
        """Return True if the pair was measured, or failed too often to wait for: one end may have been engaged."""
        return self.measured_s > -math.inf or self.failures >= MAX_FIRST_FAILURES


class PairMeasurement(NamedTuple):
    """Node `by` measures its link to node `to`."""

    by: str
    to: str
    burst_s: float


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def wanted_pairs(nodes: Sequence[MeasurableNode]) -> tuple[Pair, ...]:
    """Return the pairs to measure, in order. Without pairs of which no end can be dialled, and those inside one network
    stack."""
    if len(nodes) <= MAX_FULL_MESH:
        pairs = {pair_of(a.name, b.name) for a in nodes for b in nodes if a.name < b.name}
    else:
        pairs = _sparse_pairs(nodes)
    of = {node.name: node for node in nodes}
    return tuple(sorted(pair for pair in pairs if _can_measure(of[pair[0]], of[pair[1]])))


def _sparse_pairs(nodes: Sequence[MeasurableNode]) -> set[Pair]:
    order = sorted((node.name for node in nodes), key=_mixed)
    pairs, distance = set[Pair](), 1
    while distance < len(order):
        pairs |= {pair_of(name, order[(at + distance) % len(order)]) for at, name in enumerate(order)}
        distance *= 2
    by_island: dict[str, list[str]] = {}
    for node in nodes:
        by_island.setdefault(node.island, []).append(node.name)
    for members in sorted(by_island.values(), key=lambda each: (-len(each), each))[:MAX_ISLANDS_SEEN]:
        for node in nodes:
            chosen = members[_mixed(node.name) % len(members)]
            if chosen != node.name:
                pairs.add(pair_of(node.name, chosen))
    return pairs


def _mixed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _can_measure(one: MeasurableNode, other: MeasurableNode) -> bool:
    return (one.dialled or other.dialled) and not (one.local and other.local and one.host == other.host)


@dataclass(slots=True)
class MeasurementQueue:
    """Pairs to measure, and their history. now_s: of a monotonic clock."""

    pairs: tuple[Pair, ...] = ()
    history: dict[Pair, PairHistory] = field(default_factory=dict)
    _pairs_of: dict[str, list[Pair]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.want(self.pairs)

    def want(self, pairs: tuple[Pair, ...]) -> None:
        """Measure these pairs from now on."""
        self.pairs, self._pairs_of = pairs, {}
        for pair in pairs:
            for name in pair:
                self._pairs_of.setdefault(name, []).append(pair)

    def is_new(self, name: str) -> bool:
        """Return True if a pair of this node has neither been measured nor failed too often to wait for."""
        return not all(self.history.get(pair, PairHistory()).has_outcome for pair in self._pairs_of.get(name, ()))

    def due(self, nodes: Mapping[str, MeasurableNode], now_s: float) -> list[PairMeasurement]:
        """Return the measurements that may begin now: the most urgent first, of each node at most one."""
        newest: dict[Pair, float] = {}
        waiting = []
        for pair in self.pairs:
            a, b = nodes.get(pair[0]), nodes.get(pair[1])
            if a is None or b is None:
                continue
            past, between = self.history.get(pair, PairHistory()), pair_of(a.island, b.island)
            if a.island == b.island:
                between = pair
            newest[between] = max(newest.get(between, -math.inf), past.measured_s)
            if max(a.free_s, b.free_s) <= now_s and past_due(past, now_s, trains=a.trains and b.trains):
                waiting.append((past.measured_s > -math.inf, between, past.measured_s, pair))
        waiting.sort(key=lambda each: (each[0], newest[each[1]], each[2], each[3]))
        chosen: list[PairMeasurement] = []
        engaged: set[str] = set()
        for _, _, _, (one, other) in waiting:
            if one in engaged or other in engaged:
                continue
            engaged |= {one, other}
            chosen.append(self._between(nodes[one], nodes[other]))
        return chosen

    def _between(self, one: MeasurableNode, other: MeasurableNode) -> PairMeasurement:
        """The measuring end alternates after a failure: a firewall may stop one direction."""
        failures = self.history.get((one.name, other.name), PairHistory()).failures
        swapped = not other.dialled or (one.dialled and (other.local or (failures % 2 == 1 and not one.local)))
        by, to = (other, one) if swapped else (one, other)
        return PairMeasurement(by.name, to.name, TRAINING_BURST_S if by.trains or to.trains else IDLE_BURST_S)


def past_due(past: PairHistory, now_s: float, *, trains: bool) -> bool:
    """Return True if a pair with this past is to be measured."""
    if past.failures:
        return now_s - past.tried_s >= min(FAILED_S * 2.0 ** min(past.failures - 1, 10), REMEASURE_S)
    return now_s - past.measured_s >= (CONFIRM_S if past.doubtful else WATCH_S if trains else REMEASURE_S)


def rest_s(busy_s: float, *, trains: bool) -> float:
    """Return the pause after a measurement of busy_s, by which measurements stay within their share of time."""
    return busy_s * (1 / (TRAINING_SHARE if trains else IDLE_SHARE) - 1)
