"""Devices that nobody holds, as one pass of the reconciler gives them out.

A job that asks for N standbys keeps N free devices beyond those that it trains on, as long as it lives: no other job
gets them. So where a machine is lost, its place is taken at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.controller.jobs.agents.orphans import orphans_of
from atoll.controller.jobs.agents.sessions import AgentSession
from atoll.controller.jobs.model.members import Seats, limited_to
from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.state.records import JobRecord, NodeRecord, RunRecord


@dataclass(slots=True)
class FreeDevices:
    """Free devices and free rendezvous ports by node. kept: by job, devices reserved for it: its standbys, and those
    of lost workers' nodes."""

    devices: list[FreeDevice]
    ports: dict[str, tuple[int, ...]]
    kept: Mapping[str, tuple[FreeDevice, ...]] = field(default_factory=dict)

    def offered_to(self, job: str) -> tuple[FreeDevice, ...]:
        others = {device for name, kept in self.kept.items() if name != job for device in kept}
        return tuple(device for device in self.devices if device not in others) if others else tuple(self.devices)

    def hold(self, held: Collection[FreeDevice]) -> None:
        """Keep these from the jobs that come after."""
        if kept := set(held):
            self.devices = [d for d in self.devices if d not in kept]

    def take(self, run: RunRecord) -> None:
        """Remove what a run that has just begun holds."""
        taken = {f"{m.node}/{m.device}" for m in run.members}
        self.devices = [d for d in self.devices if d.name not in taken]
        first = run.members[0].node
        self.ports[first] = tuple(port for port in self.ports.get(first, ()) if port != run.master_port)


def find_free(
    states: Mapping[str, JobState],
    connected: Mapping[str, AgentSession],
    since_s: Mapping[tuple[str, int], float],
    now_s: float,
) -> FreeDevices:
    """Devices and ports of connected nodes beyond what runs hold. Nodes on which orphans still live give nothing.

    since_s: since when devices are free, by node and index, as far as is known.
    """
    seats = seats_by_job(states.values())
    used_ports = {(one.run.members[0].node, one.run.master_port) for one in seats.values()}
    used_ports |= {
        (one.run.members[one.view.ranks[0]].node, one.view.master_port) for one in seats.values() if one.view
    }
    held: dict[str, frozenset[int]] = {}
    for one in seats.values():
        for name, indices in one.devices.items():
            held[name] = held.get(name, frozenset()) | indices
    runs = {job: one.run for job, one in seats.items()}
    vacant = {place: job for job, one in seats.items() for place in one.vacant}
    devices: list[FreeDevice] = []
    own: dict[str, list[FreeDevice]] = {}
    ports: dict[str, tuple[int, ...]] = {}
    for name, session in connected.items():
        if has_orphans(session, seats) and any(
            session.workers[key].exit is None for key in orphans_of(name, session.workers, runs)
        ):
            continue
        ports[name] = tuple(port for port in session.ports if (name, port) not in used_ports)
        if (used := held.get(name, frozenset())) >= session.devices:
            continue
        used |= _lived_on(session, runs)
        for d in session.record.devices:
            if d.index in used:
                continue
            began_s = max(since_s.get((name, d.index), now_s), session.began_s)
            devices.append(FreeDevice(name, d.index, d.kind, d.speed, began_s, d.work_per_s))
            if (job := vacant.get((name, d.index))) is not None:
                own.setdefault(job, []).append(devices[-1])
    oldest_first = sorted(states.values(), key=lambda s: s.created)
    nodes = {name: session.record for name, session in connected.items()}
    nobodys = [device for device in devices if not any(device in mine for mine in own.values())]
    kept = kept_free(((s.job, _now(s)) for s in oldest_first), nobodys, nodes)
    kept |= {job: (*kept.get(job, ()), *mine) for job, mine in own.items()}
    return FreeDevices(devices, ports, kept)


def seats_by_job(states: Iterable[JobState]) -> dict[str, Seats]:
    """Return the seats of runs that hold devices, by job."""
    active = ((state.job.id, state.seats) for state in states if state.job.status.phase.active)
    return {job: seats for job, seats in active if seats is not None}


def has_orphans(session: AgentSession, seats: Mapping[str, Seats]) -> bool:
    """Return True if `orphans_of` finds any on this node. Every pass checks all nodes, so it looks at a run's ranks
    together."""
    for (job, number), ranks in session.ranks.items():
        known = seats.get(job)
        if known is None or known.run.run != number or not ranks <= known.ranks.get(session.record.name, frozenset()):
            return True
    return False


def _lived_on(session: AgentSession, runs: Mapping[str, RunRecord]) -> set[int]:
    """Devices of a node whose workers still live, whatever their run's record says."""
    alive = ((runs[key.job].members, key.rank) for key, w in session.workers.items() if not w.exit and key.job in runs)
    return {members[rank].device for members, rank in alive if rank < len(members)}


def _now(state: JobState) -> RunRecord | None:
    """The run with the members of its newest view."""
    return limited_to(state.run, state.views[-1]) if state.run is not None and state.views else state.run


def kept_free(
    jobs: Iterable[tuple[JobRecord, RunRecord | None]], free: Sequence[FreeDevice], nodes: Mapping[str, NodeRecord]
) -> dict[str, tuple[FreeDevice, ...]]:
    """Return the devices that are kept for each job. jobs: the oldest first. nodes: by name, to tell the devices'
    kinds.

    Devices on nodes where the job has no worker come first: failures take whole machines."""
    taken: set[FreeDevice] = set()
    kept = {}
    for job, run in jobs:
        if not job.spec.standby or run is None or job.status.phase.ended:
            continue
        kinds = {d.kind for m in run.members if m.node in nodes for d in nodes[m.node].devices if d.index == m.device}
        trains = {member.node for member in run.members}
        fit = [
            d for d in free if d not in taken and d.name not in job.learned.standby and (not kinds or d.kind in kinds)
        ]
        fit.sort(key=lambda d: (d.node in trains, d.node, d.index))
        kept[job.id] = tuple(fit[: job.spec.standby])
        taken |= set(kept[job.id])
    return kept
