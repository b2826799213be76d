"""Which devices a job's next run gets, and why not yet. Pure: time is an argument, order comes from sorting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from atoll.controller.state.records import Member

GRACE_S: Final = 1.0
"""How long a start waits for more devices when there are enough but not as many as the job can use."""


@dataclass(frozen=True, slots=True, order=True)
class FreeDevice:
    """A device of a connected node that no run holds; `since_s`: since when, on the monotonic clock."""

    node: str
    index: int
    kind: str
    speed: float
    since_s: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job asks of a start. `settled`: nodes of its last run that lived through it, best for rank 0."""

    min_workers: int
    max_workers: int
    since_s: float
    retry_delay_s: float = 0.0
    settled: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StartDecision:
    """`members` is empty while the job waits. `held` devices are kept from other jobs meanwhile."""

    members: tuple[Member, ...]
    reason: str
    master_port: int = 0
    held: tuple[FreeDevice, ...] = ()


def decide_start(
    now_s: float,
    wanted: Wanted,
    free: Sequence[FreeDevice],
    ports: Mapping[str, Sequence[int]],
    grace_s: float = GRACE_S,
) -> StartDecision:
    """Choose the devices of a job's next run, or say what it waits for.

    ports: the rendezvous ports that each node offers and no run uses; rank 0 must be on a node that has one.
    """
    delay_left_s = wanted.since_s + wanted.retry_delay_s - now_s
    if delay_left_s > 0:
        return StartDecision((), f"waiting {math.ceil(delay_left_s)} s before the next try")
    usable = _one_kind(free, wanted.min_workers)
    if len(usable) < wanted.min_workers:
        return StartDecision((), f"waiting: {len(usable)} of at least {wanted.min_workers} free devices")
    changed_s = max(wanted.since_s, *(device.since_s for device in usable))
    left_s = changed_s + grace_s - now_s
    if len(usable) < wanted.max_workers and left_s > 0:
        text = f"{len(usable)} of at most {wanted.max_workers} devices are free; waiting {left_s:.1f} s for more"
        return StartDecision((), text, held=tuple(usable))
    chosen = sorted(usable, key=lambda d: (-d.speed, d.node not in wanted.settled, d.node, d.index))
    return _lay_out(chosen[: wanted.max_workers], wanted.settled, ports)


def _one_kind(free: Sequence[FreeDevice], enough: int) -> list[FreeDevice]:
    """Workers of one run share a backend (NCCL or gloo): CUDA devices if they suffice, else CPUs, else the more."""
    kinds: dict[str, list[FreeDevice]] = {}
    for device in sorted(free):
        kinds.setdefault(device.kind, []).append(device)
    best_first = sorted(kinds, key=lambda kind: (len(kinds[kind]) < enough, kind != "cuda", -len(kinds[kind]), kind))
    return kinds[best_first[0]] if best_first else []


def _lay_out(
    chosen: Sequence[FreeDevice], settled: frozenset[str], ports: Mapping[str, Sequence[int]]
) -> StartDecision:
    """Ranks go node by node; first the node of rank 0, which must have a port and should be one that stayed before."""
    order = sorted(chosen, key=lambda d: (not ports.get(d.node), d.node not in settled, d.node, d.index))
    first = order[0].node
    if not ports.get(first):
        return StartDecision((), "waiting: no chosen node offers a free rendezvous port", held=tuple(chosen))
    members: list[Member] = []
    for node_rank, (node, grouped) in enumerate(groupby(order, key=lambda d: d.node)):
        local, first_rank = list(grouped), len(members)
        members.extend(
            Member(
                rank=first_rank + i,
                node=node,
                device=device.index,
                node_rank=node_rank,
                local_rank=i,
                local_world_size=len(local),
            )
            for i, device in enumerate(local)
        )
    devices, nodes = len(members), node_rank + 1
    text = f"starting {devices} worker{'s' * (devices > 1)} on {nodes} node{'s' * (nodes > 1)}"
    return StartDecision(tuple(members), text, min(ports[first]))
