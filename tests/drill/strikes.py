"""Carries out a planned strike: whom it hits among who is there, and bringing back what it took."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from drill import overflow
from drill.cluster import ETCD_MEMBERS, DrillCluster
from drill.crowd import SIZE, CrowdLeft, come_and_go
from drill.schedule import Hit, Planned, Strike
from drill.slow_disk import slow

_TARGET_S: Final = 10.0
"""How long a strike waits for somebody to hit: right after another one there may be none."""
_LOOK_S: Final = 0.05
_CROWDS: Final = 3
"""How many crowds one strike tries at most."""
_PIECE_S: Final = 0.05
"""For each of the some twenty pieces of the own script's checkpoint, while who saves is to be struck."""

_T = TypeVar("_T")


class Striker:
    """Strikes one cluster, from one event loop. leader: the name of the controller that leads, as last heard. step_s: a
    step of the job."""

    def __init__(self, cluster: DrillCluster, leader: Callable[[], str | None], step_s: float) -> None:
        self._cluster, self._leader, self._step_s = cluster, leader, step_s
        self.crowds: list[CrowdLeft] = []

    async def strike(self, planned: Planned) -> list[Hit]:
        """Carry it out, wait until it is over, bring back what it took. No hit where nobody was there to be struck."""
        match planned.strike:
            case Strike.WORKER | Strike.WORKER_STOP | Strike.EVERYONE:
                return await self._workers(planned)
            case Strike.RECOVERY:
                first = await self._workers(planned)
                await asyncio.sleep(planned.then_s)
                return first + await self._away(planned, self._leading)
            case Strike.SAVING:
                return await self._saving(planned)
            case Strike.AGENT | Strike.MACHINE | Strike.MACHINE_STOP:
                return await self._away(planned, lambda: _one(self._machines(), planned.draw))
            case Strike.PAIR:
                return await self._away(planned, lambda: _neighbours(self._machines(), planned.draw))
            case Strike.LEADER | Strike.LEADER_STOP:
                return await self._away(planned, self._leading)
            case Strike.ETCD:
                return await self._away(planned, lambda: self._etcd_member(planned.draw))
            case Strike.OVERFLOW:
                return await self._overflow(planned)
            case Strike.CROWD:
                return await self._crowd(planned)

    async def _workers(self, planned: Planned) -> list[Hit]:
        def chosen() -> list[tuple[str, int]]:
            there = _named(self._cluster.workers())
            return there if planned.strike is Strike.EVERYONE else _one(there, planned.draw)

        return self._signalled(planned, await _until(chosen))

    async def _saving(self, planned: Planned) -> list[Hit]:
        """A worker; its peers save what is left, on a disk that takes its time: then the one that writes."""
        pace = slow(self._cluster.evidence, _PIECE_S)
        try:
            first = await self._workers(planned)
            return first + self._signalled(planned, await _until(lambda: _named(self._cluster.savers())[:1]))
        finally:
            pace.unlink()

    async def _overflow(self, planned: Planned) -> list[Hit]:
        ranks = await _until(lambda: list(self._cluster.workers()))
        if not ranks:
            return []
        rank = int(planned.draw * len(ranks))  # of the view: others have others' numbers
        step = overflow.strike(self._cluster.evidence, rank, self._step_s)
        return [Hit(planned.strike, time.time(), (f"rank {rank} in step {step}",))] if step is not None else []

    async def _crowd(self, planned: Planned) -> list[Hit]:
        """Only where no machine is away: a job that lacks a worker takes whatever device there is. Another crowd
        follows one of which nothing can be said: its controller fell, or answered late."""
        for _ in range(_CROWDS):
            leading = await _until(lambda: self._leading() if self._cluster.all_living("machine") else [])
            left = await come_and_go(self._cluster.addresses[leading[0]]) if leading else None
            if left is not None:
                self.crowds.append(left)
                return [Hit(planned.strike, left.at_s, (f"{SIZE} agents",))]
        return []

    def _signalled(self, planned: Planned, victims: Sequence[tuple[str, int]]) -> list[Hit]:
        number = signal.SIGSTOP if planned.strike is Strike.WORKER_STOP else signal.SIGKILL
        at_s = time.time()
        hit = []
        for name, pid in victims:
            try:
                os.kill(pid, number)
                hit.append(name)
            except ProcessLookupError:
                continue  # it ended a moment ago by itself: a peer of it was lost
        return [Hit(planned.strike, at_s, tuple(hit))] if hit else []

    async def _away(self, planned: Planned, chosen: Callable[[], Sequence[str]]) -> list[Hit]:
        """Take these away for a while."""
        victims = await _until(chosen)
        if not victims:
            return []
        strike = planned.strike
        stopped = strike in (Strike.MACHINE_STOP, Strike.LEADER_STOP)
        at_s = time.time()
        for name in victims:
            if stopped:
                self._cluster.stop(name)
            elif strike in (Strike.MACHINE, Strike.PAIR):
                self._cluster.lose(name)
            else:
                self._cluster.kill(name)
        try:
            await asyncio.sleep(planned.away_s)
        finally:
            for name in victims:
                (self._cluster.go_on if stopped else self._cluster.restart)(name)
        shown = Strike.LEADER if strike is Strike.RECOVERY else strike
        return [Hit(shown, at_s, tuple(victims))]

    def _machines(self) -> list[str]:
        """With workers, in order of rank."""
        return list(dict.fromkeys(machine for machine, _ in self._cluster.workers().values()))

    def _leading(self) -> list[str]:
        leader = self._leader()
        return [leader] if leader in self._cluster.living("controller") else []

    def _etcd_member(self, draw: float) -> list[str]:
        """Only where all are there: two of three lost are not what etcd survives."""
        members = self._cluster.living("etcd")
        return _one(members, draw) if len(members) == ETCD_MEMBERS else []


def _named(workers: Mapping[int, tuple[str, int]]) -> list[tuple[str, int]]:
    return [(f"rank {rank} on {machine}", pid) for rank, (machine, pid) in workers.items()]


def _one(there: Sequence[_T], draw: float) -> list[_T]:
    return [there[int(draw * len(there))]] if there else []


def _neighbours(machines: Sequence[str], draw: float) -> list[str]:
    """Two that follow each other in order of rank: copies of the one's memory lie on the other."""
    if len(machines) < 2:
        return []
    first = int(draw * len(machines))
    return [machines[first], machines[(first + 1) % len(machines)]]


async def _until(chosen: Callable[[], Sequence[_T]]) -> Sequence[_T]:
    """Whom to strike, as soon as there is somebody; nobody after a while."""
    ends_s = time.monotonic() + _TARGET_S
    while True:
        victims = chosen()
        if victims or time.monotonic() > ends_s:
            return victims
        await asyncio.sleep(_LOOK_S)
