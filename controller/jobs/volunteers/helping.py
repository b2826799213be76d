"""Decides which run each volunteer's device helps, and which of their workers are to end. Pure.

Nothing is kept: what agents report is all that is known, so that another leader decides alike. A helper's number says
on which device of its node it is and whom it helps, and is drawn anew for each start: agents start no number twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from atoll.controller.jobs.model.observed import ForgetWorker, ObservedNode, StopRun, WorkerPhase
from atoll.controller.jobs.model.supply import (
    MIN_EDGE_MEASUREMENTS,
    Edges,
    HelpedRank,
    LaunchHelper,
    MoveHelper,
    Supply,
)
from atoll.jobs.job_spec import MAX_WORKERS
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_RANK

STOP_GRACE_S: Final = 2.0
_DEVICES: Final = 64
"""Most devices of a node, as agents may register."""
DRAWS: Final = (MAX_RANK - MAX_WORKERS) // (_DEVICES * MAX_WORKERS)


HelpingAction: TypeAlias = LaunchHelper | MoveHelper | StopRun | ForgetWorker
HelpedRuns: TypeAlias = Mapping[tuple[str, int], Sequence[HelpedRank]]
"""Ranks that accept help, by job and run, the oldest job first. A present helper stays, even if a new leader knows
no rank yet."""


def helper_number(device: int, rank: int, draw: int) -> int:
    """rank: whom it helps. draw: 0 to DRAWS - 1."""
    return MAX_WORKERS + (draw * MAX_WORKERS + rank) * _DEVICES + device


def device_of(number: int) -> int:
    return (number - MAX_WORKERS) % _DEVICES


def helped_by(number: int) -> int:
    """The rank."""
    return (number - MAX_WORKERS) // _DEVICES % MAX_WORKERS


def helping_actions(
    nodes: Iterable[ObservedNode],
    runs: HelpedRuns,
    resting: Container[tuple[str, int, str]],
    *,
    settled: Container[tuple[str, int]] = (),
    edges: Mapping[tuple[str, int, str], Edges] = MappingProxyType({}),
    fresh: Mapping[tuple[str, WorkerKey], int] = MappingProxyType({}),
) -> Iterator[HelpingAction]:
    """nodes: of volunteers, connected. resting: (node, device, job) that failed just now, and wait. settled: (job, run)
    where for a while nobody came, left or moved, and what ranks measured is of who is there. edges: of (node, device,
    job). fresh: (node, helper) that measured theirs just now, and for which time: not the first time, and once it has
    done tasks, it moves at once."""
    volunteers = sorted(nodes, key=lambda node: node.record.name)
    busy: dict[str, set[int]] = {}
    helpers: dict[tuple[str, int], list[_Helper]] = defaultdict(list)
    ranks = {one: frozenset(each.rank for each in helped) for one, helped in runs.items()}
    for node in volunteers:
        here = busy[node.record.name] = set()
        for key, worker in sorted(node.workers.items()):
            if worker.phase is WorkerPhase.EXITED:
                yield ForgetWorker(node.record.name, key)
            elif (why := _why_to_end(key, ranks, here)) is not None:
                yield StopRun(node.record.name, key.job, key.run, STOP_GRACE_S, why, (key.rank,))
            else:
                here.add(device_of(key.rank))
                power = _power(node, device_of(key.rank))
                helpers[key.job, key.run].append(_Helper(node.record.name, key, power, worker.step))
    supplies = {
        one: Supply(ranks, [(helped_by(each.key.rank), each.power) for each in helpers[one]])
        for one, ranks in runs.items()
        if ranks
    }
    counts = {one: len(helpers[one]) for one in supplies}
    for node in volunteers:
        for device in node.record.devices:
            name = node.record.name
            open_to = [one for one in supplies if (name, device.index, one[0]) not in resting]
            if device.index in busy[name] or not open_to:
                continue
            chosen = min(open_to, key=lambda one: counts[one])
            counts[chosen] += 1
            there = edges.get((name, device.index, chosen[0]), {})
            helps = supplies[chosen].take(device.speed, there)
            yield LaunchHelper(name, device.index, *chosen, helps)
    for one, supply in supplies.items():
        may = [each for each in helpers[one] if one in settled or _knows(each, fresh)]
        yield from _moves(may, supply, edges)


@dataclass(frozen=True, slots=True)
class _Helper:
    node: str
    key: WorkerKey
    power: float
    tasks: int
    """Number of tasks that it has answered."""


def _knows(helper: _Helper, fresh: Mapping[tuple[str, WorkerKey], int]) -> bool:
    """Return True if a helper's measurements may move it: during its start, while it imports, they say little of a
    link."""
    return helper.tasks > 0 and fresh.get((helper.node, helper.key), 0) >= MIN_EDGE_MEASUREMENTS


def _moves(
    helpers: Sequence[_Helper], supply: Supply, edges: Mapping[tuple[str, int, str], Edges]
) -> Iterator[MoveHelper]:
    """One at most: what comes of it is measured first."""
    for one in sorted(helpers, key=lambda each: -supply.by_rank.get(helped_by(each.key.rank), 0.0)):
        helped, device = helped_by(one.key.rank), device_of(one.key.rank)
        there = edges.get((one.node, device, one.key.job), {})
        if (rank := supply.better(helped, one.power, there)) is None:
            continue
        least, most = supply.by_rank[rank], supply.by_rank[helped]
        why = f"rank {rank} has {least:.3g} samples a second of help and rank {helped} {most:.3g}"
        if rank in there and helped in there:
            why += f", and is {1000 * there[rank]:.0f} ms from it, the other {1000 * there[helped]:.0f} ms"
        why += ": it is to help there"
        stop = StopRun(one.node, one.key.job, one.key.run, STOP_GRACE_S, why, (one.key.rank,))
        yield MoveHelper(one.node, device, stop, rank)
        return


def _power(node: ObservedNode, device: int) -> float:
    return next((one.speed for one in node.record.devices if one.index == device), 1.0)


def _why_to_end(key: WorkerKey, ranks: Mapping[tuple[str, int], frozenset[int]], busy: Container[int]) -> str | None:
    if key.rank < MAX_WORKERS:
        return "a volunteer is no rank of a run"
    if (helped := ranks.get((key.job, key.run))) is None:
        return "its run needs no help any more"
    if helped and helped_by(key.rank) not in helped:
        return "the rank that it helps is gone"
    return "another helps from this device" if device_of(key.rank) in busy else None
