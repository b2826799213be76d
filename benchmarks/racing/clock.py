"""Virtual time: what the islands' steps and the bytes between them would take, without two cores pretending to be four.

A method trains once and says what it sends and when that is needed; any number of links are then held against it. Each
island has one full-duplex link. Transfers of an island leave one after the other; a collective has ended when every
island's part of it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    def takes_s(self, one: Exchange) -> float:
        return max(one.up_bytes * 8 / self.up_bps, one.down_bytes * 8 / self.down_bps) + one.hops * self.latency_s


def link_of(rho: float, entries: int, islands: int, step_s: float, latency_s: float = 0.0) -> Network:
    """The link on which a ring all-reduce of `entries` float32 takes rho times a step without network."""
    ring_bytes = 2 * (islands - 1) / islands * entries * 4
    bps = ring_bytes * 8 / (rho * step_s)
    return Network(up_bps=bps, down_bps=bps, latency_s=latency_s)


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
            link_free_s = max(link_free_s, ready_s) + network.takes_s(one)
            due_s[one.due] = max(due_s.get(one.due, 0.0), link_free_s, *clocks)
        done.append(max(*clocks, due_s.get(step + 1, 0.0)))
    return done
