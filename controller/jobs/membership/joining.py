"""Workers that join a run which trains: in the stead of lost ones, or because a device makes it faster. Pure.

They are launched beside the view that is, and are in none until they say that they are ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.jobs.model.members import joiners, living, members_of, seat
from atoll.controller.jobs.model.observed import Action, LaunchWorkers, ObservedJob, PassClock, StopRun, ViewStage
from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import RunMember, RunRecord
from atoll.controller.state.views import ViewRecord, ViewState
from atoll.jobs.job_spec import MAX_WORKERS

JOIN_S: Final = 300.0
"""Seconds from a joiner's launch until it must be ready: it imports, builds its model and fetches state. Training
does not wait."""
FAILED_JOINERS: Final = 8
"""Workers of a run that were to join and ended before: then no more are tried."""
AGAIN_S: Final = 10.0
"""A device whose joiner has failed is left alone for so long."""
LEAVE_S: Final = 10.0
"""Seconds for a worker to leave that is not in the view in force; then it is stopped."""


def replacements(observed: ObservedJob, run: RunRecord, clock: PassClock) -> tuple[RunRecord, tuple[NewEvent, ...]]:
    """The run with workers launched in the stead of those that it lost, where devices are free for them."""
    newest = observed.views.newest
    if newest is None or observed.views.in_force is None or newest.state is ViewState.ABANDONED:
        return run, ()
    if not _take_in(observed, run, newest):
        return run, ()
    coming = joiners(run, newest)
    missing = newest.wanted - len(living(members_of(run, newest))) - len(coming)
    if missing <= 0 or any(worker.trained for worker in observed.workers.values()):
        return run, ()
    least = missing - (newest.wanted - observed.job.spec.min_workers)
    return with_joiners(observed, run, newest, _best_first(observed, run, clock, least)[:missing])


def with_joiners(
    observed: ObservedJob, run: RunRecord, newest: ViewRecord, devices: Sequence[FreeDevice]
) -> tuple[RunRecord, tuple[NewEvent, ...]]:
    """The run with a worker on each of these devices, that is to join."""
    if not devices or len(run.members) + len(devices) > MAX_WORKERS:
        return run, ()
    if len(_failed(observed, run)) >= FAILED_JOINERS:
        return run, ()
    members, added = list(run.members), []
    for device in devices:
        node = observed.nodes.get(device.node)
        island, behind_nat = (node.record.island, node.record.behind_nat) if node is not None else ("", False)
        member = seat(replace(run, members=tuple(members)), device, island, behind_nat=behind_nat)
        members.append(member)
        added.append(member)
    names = tuple(f"rank {m.rank} on {m.node}/{m.device}" for m in added)
    event = NewEvent(kind=EventKind.WORKERS_JOINING, run=run.run, view=newest.view, joined=names)
    return replace(run, members=tuple(members)), (event,)


def _best_first(observed: ObservedJob, run: RunRecord, clock: PassClock, least: int) -> list[FreeDevice]:
    """Return devices of the run's kind: those that it had before, then the fastest. Devices left out as slow are
    added only up to `least`, without which the job cannot continue."""
    had = {f"{member.node}/{member.device}" for member in run.members}
    failed = {f"{member.node}/{member.device}" for member in _failed(observed, run)}
    kinds = {device.kind for member in run.members if (device := observed.device_of(member)) is not None}
    standby = observed.job.learned.standby
    fit = [
        device
        for device in observed.devices.free
        if device.kind in kinds and not (device.name in failed and clock.now_s - device.since_s < AGAIN_S)
    ]
    fit.sort(key=lambda device: (device.name not in had, -device.work_per_s, -device.speed, device.name))
    wanted = [device for device in fit if device.name not in standby]
    slow = sorted((device for device in fit if device.name in standby), key=lambda device: -device.work_per_s)
    return wanted + slow[: max(least - len(wanted), 0)]


def _failed(observed: ObservedJob, run: RunRecord) -> list[RunMember]:
    """Return the joiners that ended before they were in a view."""
    were = {rank for view in observed.views.kept for rank in view.ranks}
    first = observed.views.kept[0].view == 1
    return [m for m in run.members if m.exit is not None and m.rank not in were] if first else []


def launches(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    """Joiners that their agents do not know yet, one by one: each is told the view that is."""
    if (newest := observed.views.newest) is None:
        return
    for member in joiners(run, newest):
        node = observed.nodes.get(member.node)
        if member.rank not in observed.workers and node is not None and node.connected:
            yield LaunchWorkers(member.node, run.job, run.run, (member.rank,), joins=True)


def stops(observed: ObservedJob, run: RunRecord, clock: PassClock) -> Iterator[Action]:
    """Single workers that the run goes on without: who cannot join or takes too long, and who should have left."""
    if (newest := observed.views.newest) is None:
        return
    join_s = JOIN_S + observed.job.spec.environment_s
    in_force_s = clock.now_s - observed.views.since_s if newest.state is ViewState.IN_FORCE else 0.0
    for member in joiners(run, newest):
        worker = observed.workers.get(member.rank)
        if worker is None:
            continue
        stage = worker.view_report.stage if worker.view_report is not None else ViewStage.JOINING
        reason = ""
        if stage is ViewStage.UNABLE and worker.view_report is not None:
            reason = f"it cannot join: {worker.view_report.reason}"
        elif stage is ViewStage.JOINING and clock.now_s - observed.views.joining_since_s > join_s:
            reason = f"it was not ready to join within {join_s:.0f} s"
        elif stage not in (ViewStage.JOINING, ViewStage.READY) and in_force_s > LEAVE_S:
            reason = f"it is not in view {newest.view}"
        if reason:
            yield StopRun(member.node, run.job, run.run, 0.0, reason, (member.rank,))


def can_change(observed: ObservedJob, run: RunRecord) -> bool:
    """Return True if the run can add and remove workers in place: its newest view is in force, and all members have
    completed a step in it."""
    newest = observed.views.newest
    if newest is None or newest.state is not ViewState.IN_FORCE or not newest.stepped_unix_s:
        return False
    for member in members_of(run, newest):
        worker = observed.workers.get(member.rank)
        if (
            worker is None
            or worker.trained
            or worker.view_report is None
            or worker.view_report.stage is not ViewStage.TRAINING
        ):
            return False
    return _take_in(observed, run, newest)


def _take_in(observed: ObservedJob, run: RunRecord, newest: ViewRecord) -> bool:
    """Return True if all members can leave their view at a boundary for one with new members, by their strategy and
    their own version."""
    workers = [observed.workers.get(member.rank) for member in living(members_of(run, newest))]
    words = [worker.view_report for worker in workers if worker is not None]
    return len(words) == len(workers) and all(word is not None and word.takes_in for word in words)
