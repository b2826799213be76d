"""Decides which run each volunteer's device helps, and which of their workers are to end. Pure.

Nothing is kept: what agents report is all that is known, so that another leader decides alike. A helper's number says
on which device of its node it is, and is drawn anew for each start: agents start no number twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from atoll.controller.jobs.lifecycle.observed import ForgetWorker, ObservedNode, StopRun, WorkerPhase
from atoll.jobspec import MAX_WORKERS
from atoll.message_limits import MAX_RANK
from atoll.worker_key import WorkerKey

STOP_GRACE_S: Final = 2.0
_DEVICES: Final = 64
"""Of a node at most, as agents may register."""
DRAWS: Final = (MAX_RANK - MAX_WORKERS) // _DEVICES


@dataclass(frozen=True, slots=True)
class HelpedRank:
    """A rank that takes help, and where."""

    rank: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class LaunchHelper:
    node: str
    device: int
    job: str
    run: int
    helps: HelpedRank


HelpingAction: TypeAlias = LaunchHelper | StopRun | ForgetWorker
HelpedRuns: TypeAlias = Mapping[tuple[str, int], Sequence[HelpedRank]]
"""By job and run, the oldest job first: its ranks that take help, as far as is known; who helps one already stays, also
where a controller that has just begun to lead knows of none yet."""


def helper_number(device: int, draw: int) -> int:
    """draw: 0 to DRAWS - 1."""
    return MAX_WORKERS + draw * _DEVICES + device


def device_of(number: int) -> int:
    return (number - MAX_WORKERS) % _DEVICES


def helping_actions(
    nodes: Iterable[ObservedNode], runs: HelpedRuns, resting: Container[tuple[str, int, str]]
) -> Iterator[HelpingAction]:
    """nodes: of volunteers, connected. resting: (node, device, job) that failed just now, and wait."""
    volunteers = sorted(nodes, key=lambda node: node.record.name)
    busy: dict[str, set[int]] = {}
    helpers: Counter[tuple[str, int]] = Counter()
    for node in volunteers:
        here = busy[node.record.name] = set()
        for key, worker in sorted(node.workers.items()):
            if worker.phase is WorkerPhase.EXITED:
                yield ForgetWorker(node.record.name, key)
            elif (why := _why_to_end(key, runs, here)) is not None:
                yield StopRun(node.record.name, key.job, key.run, STOP_GRACE_S, why, (key.rank,))
            else:
                here.add(device_of(key.rank))
                helpers[key.job, key.run] += 1
    for node in volunteers:
        for device in node.record.devices:
            name = node.record.name
            open_to = [one for one, ranks in runs.items() if ranks and (name, device.index, one[0]) not in resting]
            if device.index in busy[name] or not open_to:
                continue
            chosen = min(open_to, key=lambda one: helpers[one])
            ranks = runs[chosen]
            yield LaunchHelper(name, device.index, *chosen, ranks[helpers[chosen] % len(ranks)])
            helpers[chosen] += 1


def _why_to_end(key: WorkerKey, runs: HelpedRuns, busy: Container[int]) -> str | None:
    if key.rank < MAX_WORKERS:
        return "a volunteer is no rank of a run"
    if (key.job, key.run) not in runs:
        return "its run needs no help any more"
    return "another helps from this device" if device_of(key.rank) in busy else None
