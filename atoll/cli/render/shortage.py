"""Counts the devices that a job could use, and says what it waits for if they are too few. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from atoll.cli.render import wire
from atoll.cli.render.terminal import printable

if TYPE_CHECKING:
    from atoll.v1.jobs_pb2 import Job, Node

_JOBS_NAMED: Final = 3
_OF_UP: Final = "local-"
"""Beginning of the names of `atoll up`'s agents."""


def usable_devices(nodes: Iterable[Node], least: int = 1) -> int:
    """Return how many devices a job could use, as the controller chooses: GPUs if there are `least`, else CPUs, else
    the more. Volunteers do not count."""
    kinds = _kinds(nodes)
    return kinds["cuda"] if kinds["cuda"] >= least else max(kinds.values(), default=0)


def missing_devices(job: Job, nodes: Sequence[Node]) -> str:
    """Return a line that says for how many devices a job waits, and what to do; empty if enough are free for it."""
    wanted, there = job.spec.min_workers, usable_devices(nodes, job.spec.min_workers)
    if there >= wanted:
        return _busy_devices(job, nodes, there)
    missing = wanted - there
    if missing > 1:
        what = f"{missing} more devices" if there else f"{missing} devices"
    else:
        what = f"a {_ordinal(wanted)} device" if there else "a device"
    kinds = {kind: count for kind, count in _kinds(nodes).items() if count}
    have = f"{there} {'is' if there == 1 else 'are'} connected" if there else "none is connected"
    if len(kinds) > 1:
        have = " and ".join(f"{count} {kind}" for kind, count in kinds.items())
        have += " devices are connected, and workers of a job are of one kind"
    add = "Start `atoll agent` on another machine" if kinds else "Start `atoll agent` on each machine that has some"
    names = [node.name for node in nodes if node.connected]
    if names and all(name.startswith(_OF_UP) for name in names) and "cuda" not in kinds:
        add = f"For more agents on this machine: `atoll down`, then `atoll up --agents {wanted} --detach`"
    fewer = f". Or `atoll cancel {job.id}`, and ask for --workers {there}" if there else ""
    return f"{printable(job.id)} waits for {what}: {have}. {add}{fewer}"


def _busy_devices(job: Job, nodes: Sequence[Node], there: int) -> str:
    """Return a line that names the jobs on whose devices this one waits; empty if enough are free.

    there: devices of the kind that it would use."""
    taken = Counter(
        worker.id.job
        for node in nodes
        if node.connected and not node.volunteer
        for worker in node.workers
        if worker.id.job != job.id and wire.state(worker) != "exited"
    )
    free = max(0, there - taken.total())
    if free >= job.spec.min_workers:
        return ""
    others = [printable(other) for other in sorted(taken)]
    end = f"`atoll cancel {others[0]}` ends {'it' if len(others) == 1 else 'one'}"
    if there == 1:
        return f"{printable(job.id)} waits for the only device, on which {others[0]} trains. {end}"
    named = ", ".join(others[:_JOBS_NAMED]) + (f" and {len(others) - _JOBS_NAMED} more" if others[_JOBS_NAMED:] else "")
    what = f"{job.spec.min_workers} free device{'s' * (job.spec.min_workers > 1)}: {free} of {there}"
    return f"{printable(job.id)} waits for {what} {'is' if free == 1 else 'are'} free, the others train {named}. {end}"


def _kinds(nodes: Iterable[Node]) -> Counter[str]:
    return Counter(device.kind for node in nodes if node.connected and not node.volunteer for device in node.devices)


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"
