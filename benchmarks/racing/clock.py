"""Virtual time: what the islands' steps and the bytes between them would take, without two cores pretending to be four.

A method trains once and says what it sends and when that is needed; any number of links are then held against it. Each
island has one full-duplex link. Transfers of an island leave one after the other; a collective has ended when every
island's part of it has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective. `up_bytes` and `down_bytes` are of one island. It begins when every island has done step `after`,
    less `overlap` (share of the step that it may use already), and has to be there before step `due` begins."""

    after: int
    due: int
    up_bytes: float
    down_bytes: float
    overlap: float = 0.0
    hops: int = 1  # one after the other, each with the link's latency


@dataclass(frozen=True, slots=True)
class Network:
    """up_bps, down_bps: bits per second of one island's link. latency_s: one way."""

    up_bps: float
    down_bps: float
    latency_s: float = 0.0
    rates: tuple[float, ...] = (1.0,)
    """What is there of both in turn, each for `each_s` seconds, over and over."""
    each_s: float = math.inf

    def takes_s(self, one: Exchange, begin_s: float = 0.0) -> float:
        """From its first to its last byte on the link. begin_s: when the link is free for it."""
        left_s = max(one.up_bytes * 8 / self.up_bps, one.down_bytes * 8 / self.down_bps)
        turn, now_s = int(begin_s / self.each_s), begin_s
        while left_s > (until_s := (turn + 1) * self.each_s - now_s) * (rate := self.rates[turn % len(self.rates)]):
            left_s -= until_s * rate
            turn, now_s = turn + 1, (turn + 1) * self.each_s
        return now_s + left_s / rate - begin_s


def link_of(rho: float, entries: int, islands: int, step_s: float, latency_s: float = 0.0) -> Network:
    """The link on which a ring all-reduce of `entries` float32 takes rho times a step without network."""
    ring_bytes = 2 * (islands - 1) / islands * entries * 4
    bps = ring_bytes * 8 / (rho * step_s)
    return Network(up_bps=bps, down_bps=bps, latency_s=latency_s)


def conditions(network: Network, step_s: float, trace: Sequence[float]) -> Mapping[str, Network]:
    """The link as it may be besides. trace: rates in any unit; each holds for a step, their mean is the link's."""
    mean = sum(trace) / len(trace)
    return {
        "RTT 50 ms": replace(network, latency_s=0.025),
        "up a tenth of down": replace(network, up_bps=network.up_bps / 10),
        "trace": replace(network, rates=tuple(rate / mean for rate in trace), each_s=step_s),
    }


def finished_s(exchanges: Sequence[Exchange], steps: int, step_s: Sequence[float], network: Network) -> list[float]:
    """When each of `steps` steps was done on the slowest island, seconds.

    step_s: of each island. Lock-step methods: a step begins when all that is due before it is there."""
    by_step: dict[int, list[Exchange]] = {}
    for one in exchanges:
        by_step.setdefault(one.after, []).append(one)
    due_s: dict[int, float] = {}
    done, link_free_s, waits_until_s = [], 0.0, 0.0
    clocks = [0.0] * len(step_s)
    for step in range(steps):
        waits_until_s = max(waits_until_s, due_s.pop(step, 0.0))
        clocks = [max(clock, waits_until_s) + takes for clock, takes in zip(clocks, step_s, strict=True)]
        for one in by_step.get(step, ()):
            ready_s = max(clock - one.overlap * takes for clock, takes in zip(clocks, step_s, strict=True))
            begin_s = max(link_free_s, ready_s)
            link_free_s = begin_s + network.takes_s(one, begin_s)
            there_s = link_free_s + one.hops * network.latency_s
            due_s[one.due] = max(due_s.get(one.due, 0.0), there_s, *clocks)
        done.append(max(*clocks, due_s.get(step + 1, 0.0)))
    return done
