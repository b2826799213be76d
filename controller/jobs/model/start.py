"""Chooses the devices of a job's next run, or gives the reason to wait. Pure: time is an argument, order is sorted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Final

from atoll.controller.state.records import RunMember, Standby

GRACE_S: Final = 1.0
"""How long a start waits for more devices when there are enough but not as many as the job can use."""
MAX_UNMEASURED_RATIO: Final = 10.0
"""A device this many times slower than the fastest waits until the run has measured the cost of a step."""
SURVIVOR_BONUS: Final = 1.25
"""Factor on the speed of a device of the last run: another must be faster by more than the error of measuring."""
MAX_WORK_RATIO: Final = 1.5
"""Largest ratio of two measurements of a device, between starts of its agent, that count as the same speed."""


@dataclass(frozen=True, slots=True, order=True)
class FreeDevice:
    """A device of a connected node that no run holds; `since_s`: since when, on the monotonic clock."""

    node: str
    index: int
    kind: str
    speed: float
    since_s: float
    work_per_s: float = 0.0
    name: str = field(init=False, repr=False, compare=False)
    """"node/index": made once, for a start asks thousands of devices for it several times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.node}/{self.index}")


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Needs of a job's start. `seats`: nodes of its last run in the order of ranks, with the number of devices of each;
    `survivors`: those that were not lost in it. By "node/device": `standby`, devices that the job left out before;
    `learned`, seconds per sample. `total_batch`: samples of a step, 0 if no run reported it yet. `stages`: workers that
    hold a model together; a run has a multiple of them."""

    min_workers: int
    max_workers: int
    since_s: float
    retry_delay_s: float = 0.0
    seats: tuple[tuple[str, int], ...] = ()
    survivors: frozenset[str] = frozenset()
    standby: Mapping[str, Standby] = field(default_factory=dict)
    learned: Mapping[str, float] = field(default_factory=dict)
    total_batch: int = 0
    stages: int = 1


@dataclass(frozen=True, slots=True)
class StartDecision:
    """`members` is empty while the job waits; `devices`: theirs, by rank. `held` devices are kept from other jobs
    meanwhile. `standby`: why free devices were left out of a run that starts."""

    members: tuple[RunMember, ...]
    reason: str
    devices: tuple[FreeDevice, ...] = ()
    master_port: int = 0
    held: tuple[FreeDevice, ...] = ()
    standby: Mapping[str, Standby] = field(default_factory=dict)


def decide_start(
    now_s: float,
    wanted: StartRequest,
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
    kind = _one_kind(free, wanted.min_workers)
    if len(kind) < wanted.min_workers:
        return StartDecision((), f"waiting for devices: {len(kind)} free, at least {wanted.min_workers} needed")
    standby = _left_out(kind, wanted)
    usable = [device for device in kind if device.name not in standby]
    changed_s = max(wanted.since_s, *(device.since_s for device in usable))
    left_s = changed_s + grace_s - now_s
    if len(usable) < wanted.max_workers and left_s > 0:
        text = f"{len(usable)} of at most {wanted.max_workers} devices are free; waiting {left_s:.1f} s for more"
        return StartDecision((), text, held=tuple(usable))
    rates, _ = _rates(usable, wanted.learned)

    def best_first(device: FreeDevice) -> tuple[float, bool]:
        survived = device.node in wanted.survivors
        return (-rates[device.name] * (SURVIVOR_BONUS if survived else 1), not survived)

    # by node and index among equals: so they are ordered already
    most = min(len(usable), wanted.max_workers)
    decision = _lay_out(sorted(usable, key=best_first)[: most - most % wanted.stages], wanted, ports)
    return replace(decision, standby=standby) if decision.members else decision


def same_work(before: float, now: float) -> bool:
    """Return True if a device that measured `before` and now measures `now` (0: not measured) is as fast as it was."""
    return not (before and now) or 1 / MAX_WORK_RATIO < now / before < MAX_WORK_RATIO


def _rates(devices: Sequence[FreeDevice], learned: Mapping[str, float]) -> tuple[dict[str, float], bool]:
    """Return relative speeds of devices, and whether they were measured: in earlier runs if all of them were, else by
    the benchmark if all have one. Otherwise they are the speeds that were set."""
    if all(learned.get(d.name, 0.0) > 0 for d in devices):
        return {d.name: 1 / learned[d.name] for d in devices}, True
    if all(d.work_per_s > 0 for d in devices):
        return {d.name: d.work_per_s for d in devices}, True
    return {d.name: d.speed for d in devices}, False


def _left_out(devices: Sequence[FreeDevice], wanted: StartRequest) -> dict[str, Standby]:
    """Return devices that would slow every step, as far as is known before it is measured. Never so many that the job
    could not start."""
    rates, measured = _rates(devices, wanted.learned)
    if not wanted.standby and not measured:
        return {}
    waiting = {
        d.name: wanted.standby[d.name]
        for d in devices
        if d.name in wanted.standby and same_work(wanted.standby[d.name].work_per_s, d.work_per_s)
    }
    if measured:
        waiting |= _too_slow([d for d in devices if d.name not in waiting], rates, wanted.total_batch)
    missing = wanted.min_workers - (len(devices) - len(waiting))
    for name in sorted(waiting, key=lambda name: (-rates[name], name))[: max(missing, 0)]:
        del waiting[name]
    return waiting


def _too_slow(devices: Sequence[FreeDevice], rates: Mapping[str, float], total_batch: int) -> dict[str, Standby]:
    """Return devices whose fair share of the batch is less than a sample; without a batch, much slower ones."""
    slowest_first = sorted(devices, key=lambda d: (rates[d.name], d.name))
    together, waiting = sum(rates[d.name] for d in devices), {}
    for device in slowest_first[:-1]:
        rate = rates[device.name]
        ratio = rates[slowest_first[-1].name] / rate
        if total_batch and total_batch * rate >= together:
            break
        if not total_batch and ratio <= MAX_UNMEASURED_RATIO:
            break
        why = "its fair share of the batch is less than a sample" if total_batch else "no step was measured yet"
        text = f"{ratio:.0f} times slower than the fastest device, and {why}"
        waiting[device.name] = Standby(reason=text, work_per_s=device.work_per_s)
        together -= rate
    return waiting


def _one_kind(free: Sequence[FreeDevice], enough: int) -> list[FreeDevice]:
    """Workers of one run share a backend (NCCL or gloo): CUDA devices if they suffice, else CPUs, else the more."""
    kinds: dict[str, list[FreeDevice]] = {}
    for device in sorted(free, key=attrgetter("node", "index")):
        kinds.setdefault(device.kind, []).append(device)
    best_first = sorted(kinds, key=lambda kind: (len(kinds[kind]) < enough, kind != "cuda", -len(kinds[kind]), kind))
    return kinds[best_first[0]] if best_first else []


def _lay_out(chosen: Sequence[FreeDevice], wanted: StartRequest, ports: Mapping[str, Sequence[int]]) -> StartDecision:
    """Ranks go node by node; the first node must have a port."""
    by_node = {node: list(found) for node, found in groupby(sorted(chosen), key=lambda d: d.node)}
    order = _seated({node: len(found) for node, found in by_node.items()}, wanted, ports)
    first = next((node for node in order if ports.get(node)), None)
    if first is None:
        return StartDecision((), "waiting: no chosen node offers a free rendezvous port", held=tuple(chosen))
    at = order.index(first)
    order[0], order[at] = first, order[0]
    members: list[RunMember] = []
    devices: list[FreeDevice] = []
    for node_rank, node in enumerate(order):
        local, first_rank = by_node[node], len(members)
        devices += local
        members.extend(
            RunMember(
                rank=first_rank + i,
                node=node,
                device=device.index,
                node_rank=node_rank,
                local_rank=i,
                local_world_size=len(local),
            )
            for i, device in enumerate(local)
        )
    workers, nodes = len(members), node_rank + 1
    text = f"starting {workers} worker{'s' * (workers > 1)} on {nodes} node{'s' * (nodes > 1)}"
    return StartDecision(tuple(members), text, tuple(devices), min(ports[first]))


def _seated(sizes: Mapping[str, int], wanted: StartRequest, ports: Mapping[str, Sequence[int]]) -> list[str]:
    """The nodes in the order of ranks: each where it was, so that the shards in its memory stay its own, and in the
    place of one that is gone a new one, best of as many devices. sizes: chosen devices, by node."""
    seats = dict(wanted.seats)
    new = [node for node in sizes if node not in seats]
    new.sort(key=lambda node: (not ports.get(node), node not in wanted.survivors, node))
    order = []
    for node, devices in seats.items():
        if node in sizes:
            order.append(node)
        elif new:
            successor = next((one for one in new if sizes[one] == devices), new[0])
            new.remove(successor)
            order.append(successor)
    return order + new
