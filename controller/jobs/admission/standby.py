"""Keeps free devices for jobs that asked for standbys. Pure.

A job that asks for N keeps N free devices beyond those that it trains on, as long as it lives: no other job gets them.
So where a machine is lost, its place is taken at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from atoll.controller.jobs.lifecycle.start import FreeDevice
from atoll.controller.state.records import JobRecord, NodeRecord, RunRecord


def kept_free(
    jobs: Iterable[tuple[JobRecord, RunRecord | None]], free: Sequence[FreeDevice], nodes: Mapping[str, NodeRecord]
) -> dict[str, tuple[FreeDevice, ...]]:
    """By job, the devices that are kept for it. jobs: the oldest first. nodes: by name, to tell the devices' kinds.

    Devices on nodes where the job has no worker come first: it is machines that are lost."""
    taken: set[FreeDevice] = set()
    kept = {}
    for job, run in jobs:
        if not job.spec.standby or run is None or job.phase.ended:
            continue
        kinds = {d.kind for m in run.members if m.node in nodes for d in nodes[m.node].devices if d.index == m.device}
        trains = {member.node for member in run.members}
        fit = [d for d in free if d not in taken and d.name not in job.standby and (not kinds or d.kind in kinds)]
        fit.sort(key=lambda d: (d.node in trains, d.node, d.index))
        kept[job.id] = tuple(fit[: job.spec.standby])
        taken |= set(kept[job.id])
    return kept
