"""Decides whether a running job takes in free devices, which it leaves waiting, and which it sends back. Pure.

Three assessments, each a function of what is observed: devices that offer themselves are predicted (admitting.py); a
run that took devices in is held against the run before, as it was measured; a worker whose fixed cost holds every step
up is predicted away. A restart is what each of them costs, so each has to promise more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.estimators.profile import Profile
from atoll.controller.jobs.admission.admitting import (
    AdmissionAnswer,
    AdmissionDecision,
    AdmissionQuestion,
    RatedDevice,
    answer,
    dispensable,
)
from atoll.controller.jobs.model.device_memory import UNKNOWN, name_of
from atoll.controller.jobs.model.observed import GROW_STABLE_S, ObservedJob, PassClock
from atoll.controller.jobs.model.policy import policy_of
from atoll.controller.jobs.model.start import FreeDevice, same_work
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import (
    AdmissionRecord,
    Cause,
    Growth,
    JobPhase,
    JobRecord,
    Level,
    PhaseChange,
    RunRecord,
    Standby,
)

FREED_S: Final = 1.0
"""Seconds for which a device is free before its former run takes it back; other devices must first prove stable."""
JUDGE_EVERY_S: Final = 10.0
UNMEASURED_S: Final = 15.0
"""Seconds to wait for a run that reports no measured steps, before devices are added without a prediction."""
TRIAL_S: Final = 60.0
"""Seconds for which devices wait while the run with those added before is compared with the run without them."""
STEADY_S: Final = 10.0
STEADY_STEPS: Final = 10
SLOWER: Final = 0.1
"""A run is slower than the one before it where it trains at least this part fewer samples a second, and two standard
errors of both."""
CERTAIN_SLOWDOWN: Final = 0.3
"""Slowdown, as a share, that counts as one however unsteady the steps are."""
RESTART_S: Final = 8.0
"""Stands for what a restart costs before this job has seen one."""
KEPT_STANDBYS: Final = 64
_NOTHING: Final[Mapping[str, float]] = {}
_NUMBERS: Final = re.compile(r"[\d.]+(e[+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAssessment:
    """Result of an assessment. `cause`: why the run should change, if it should, with the sentence `text`. `names`:
    devices to add or to leave out. `keeps_unsent`: these keep their unsent updates. `admission`: the planner's
    answer, if it changed something."""

    job: JobRecord
    cause: Cause | None = None
    names: tuple[str, ...] = ()
    text: str = ""
    events: tuple[NewEvent, ...] = ()
    judged: bool = False
    keeps_unsent: bool = False
    admission: AdmissionRecord | None = None


def assess_devices(observed: ObservedJob, run: RunRecord, clock: PassClock) -> DeviceAssessment:
    """Choose at most one of: leave devices out, add devices, let them wait. The run's workers must all be alive and
    able to stop at a step boundary."""
    sent_back = _compared(observed, run, clock)
    if sent_back.cause is not None:
        return sent_back
    free = _offering(observed, run, clock)
    names = {device.name for device in free}
    if free and (names - observed.job.learned.standby.keys() or clock.now_s - observed.judged_s >= JUDGE_EVERY_S):
        assessment = _offered(replace(observed, job=sent_back.job), run, free, clock)
    elif clock.now_s - observed.judged_s >= JUDGE_EVERY_S and is_steady(observed, run, clock):
        assessment = _without_slowest(replace(observed, job=sent_back.job), run, clock)
    else:
        return sent_back
    return replace(assessment, events=(*sent_back.events, *assessment.events))


# Devices that offer themselves


def _offering(observed: ObservedJob, run: RunRecord, clock: PassClock) -> list[FreeDevice]:
    """Free for a while, of the run's kind, and not sent back from a run as large as this one."""
    wait_s = GROW_STABLE_S if observed.job.learned.growth is None else TRIAL_S
    if len(run.members) >= observed.job.spec.max_workers or clock.now_s - observed.since_s < wait_s:
        return []
    first = run.members[0]
    kinds = {device.kind for device in observed.nodes[first.node].record.devices}
    began = observed.run.members if observed.run is not None and observed.devices.free else ()
    had = {(member.node, member.device) for member in began}
    return [
        d
        for d in observed.devices.free
        if d.kind in kinds
        and clock.now_s - d.since_s >= (FREED_S if (d.node, d.index) in had else GROW_STABLE_S)
        and not _slowed(observed.job.learned.standby.get(d.name), d, run)
    ]


def _slowed(standby: Standby | None, device: FreeDevice, run: RunRecord) -> bool:
    if standby is None or not standby.slowed or not same_work(standby.work_per_s, device.work_per_s):
        return False
    return len(run.members) >= standby.slowed


def _offered(observed: ObservedJob, run: RunRecord, free: Sequence[FreeDevice], clock: PassClock) -> DeviceAssessment:
    job, room = observed.job, observed.job.spec.max_workers - len(run.members)
    profile = observed.training.profile if is_measured(observed) and job.spec.stages == 1 else None
    found = None if profile is None else answer(_question(observed, run, profile, free, learned(job, free)))
    if found is None:
        found = _unmeasured(observed, run, free, clock)
        if not found.unknown:
            return DeviceAssessment(job=job)
    job, events = _waiting(job, found.waiting, {d.name: d.work_per_s for d in free})
    take = [*found.admitted, *found.unknown][:room]
    take = take[: len(take) - (len(run.members) + len(take)) % job.spec.stages]  # whole pipelines only
    if not take:
        news = found.planned if job.learned.standby != observed.job.learned.standby else None
        return _recorded(DeviceAssessment(job=job, events=events, judged=True), run, clock, news, _verdicts(found))
    nodes = sorted({d.node for d in free if d.name in take})
    text = f"growing from {len(run.members)} to {len(run.members) + len(take)} workers: devices are free on "
    text += ", ".join(nodes[:8])
    events += tuple(
        NewEvent(kind=EventKind.DEVICE_ADMITTED, device=name, cause=found.admitted.get(name, _UNKNOWN)) for name in take
    )
    standby = {name: standby for name, standby in job.learned.standby.items() if name not in take}
    job = replace(job, learned=replace(job.learned, growth=_growth(observed, run, take), standby=standby))
    assessment = DeviceAssessment(job=job, cause=Cause.GROW, names=tuple(take), text=text, events=events, judged=True)
    return _recorded(assessment, run, clock, found.planned, _verdicts(found))


def _recorded(
    assessment: DeviceAssessment, run: RunRecord, clock: PassClock, planned: AdmissionDecision | None, reason: str
) -> DeviceAssessment:
    """Add the planner's decision for the record, if it made one."""
    if planned is None:
        return assessment
    job = assessment.job
    number = job.status.admissions + 1
    admission = AdmissionRecord(
        id=number, run=run.run, unix_s=clock.unix_s, reason=reason, input=planned.input, output=planned.output
    )
    job = replace(job, status=replace(job.status, admissions=number))
    return replace(assessment, job=job, admission=admission)


def _verdicts(found: AdmissionAnswer) -> str:
    """'x/0 is admitted; y/0, z/0 wait': what each was told is in the planner's output."""
    parts = []
    for names, one, more in ((found.admitted, "is admitted", "are admitted"), (found.waiting, "waits", "wait")):
        if names:
            shown = ", ".join(sorted(names)[:8]) + (f", … ({len(names)})" if len(names) > 8 else "")
            parts.append(f"{shown} {one if len(names) == 1 else more}")
    return "; ".join(parts)


_UNKNOWN: Final = "how fast it is for this job is not known, so the run will show it"


def _question(
    observed: ObservedJob,
    run: RunRecord,
    profile: Profile,
    free: Sequence[FreeDevice] = (),
    known: Mapping[str, float] = _NOTHING,
) -> AdmissionQuestion:
    policy = policy_of(observed.job, observed.strategy)
    return AdmissionQuestion(
        profile=profile,
        workers=_workers(observed, run),
        offers=[RatedDevice(d.name, d.work_per_s, _held(observed, d.name)) for d in free],
        learned=known,
        split=observed.job.spec.split,
        batch_range=(policy.min_batch, policy.max_batch) if policy.adapts_batch else None,
        batches_per_update=policy.batches_per_update,
        restart_s=restart_s(observed.job.status.history),
    )


def _workers(observed: ObservedJob, run: RunRecord) -> list[RatedDevice]:
    devices = [(member, observed.device_of(member)) for member in run.members]
    return [
        RatedDevice(name_of(m), device.work_per_s if device else 0.0, _held(observed, name_of(m)))
        for m, device in devices
    ]


def _held(observed: ObservedJob, name: str) -> int:
    return observed.job.learned.memory.get(name, UNKNOWN).max_batch


def _unmeasured(observed: ObservedJob, run: RunRecord, free: Sequence[FreeDevice], clock: PassClock) -> AdmissionAnswer:
    """Add new devices at once if no prediction will come: for whole pipelines, which cannot be predicted, or if the
    run, or one of its ranks, had time to measure and did not. Devices that a verdict keeps
    waiting still wait."""
    profile, began_s = observed.training.profile, max(observed.since_s, observed.plans.planned_s)
    silent = profile is None or profile.total_batch == 0 or profile.steps >= STEADY_STEPS
    hopeless = observed.job.spec.stages > 1 or (silent and clock.now_s - began_s >= UNMEASURED_S)
    new = (d for d in free if d.name not in observed.job.learned.standby)
    return AdmissionAnswer({}, {}, tuple(sorted(d.name for d in new if hopeless or not _foreseeable(observed, run, d))))


def _foreseeable(observed: ObservedJob, run: RunRecord, device: FreeDevice) -> bool:
    """Return True if the device can be predicted once the run has measured its steps."""
    if device.name in learned(observed.job, [device]):
        return True
    return device.work_per_s > 0 and any(worker.work_per_s > 0 for worker in _workers(observed, run))


def learned(job: JobRecord, devices: Iterable[FreeDevice]) -> dict[str, float]:
    """Seconds per sample by name, of devices that earlier runs measured and that are as fast as they were then."""
    return {
        d.name: job.learned.speeds[d.name]
        for d in devices
        if d.name in job.learned.speeds and same_work(job.learned.learned_at.get(d.name, 0.0), d.work_per_s)
    }


def _waiting(
    job: JobRecord, reasons: Mapping[str, str], work: Mapping[str, float]
) -> tuple[JobRecord, tuple[NewEvent, ...]]:
    """The job with these verdicts. One that says the same with other numbers is not written again."""
    new = {
        name: Standby(reason=reason, work_per_s=work.get(name, 0.0))
        for name, reason in reasons.items()
        if name not in job.learned.standby or _gist(job.learned.standby[name].reason) != _gist(reason)
    }
    return stood_by(job, new, work)


def stood_by(
    job: JobRecord, new: Mapping[str, Standby], present: Collection[str]
) -> tuple[JobRecord, tuple[NewEvent, ...]]:
    """The job with these standbys. A device that waited before for another reason is not told of again, or every change
    of what is measured would be an event. Of too many those that are not `present` are forgotten first."""
    if not new:
        return job, ()
    every = {**job.learned.standby, **new}
    kept = sorted(every, key=lambda name: (name not in new, name not in present, name))[:KEPT_STANDBYS]
    events = tuple(
        NewEvent(kind=EventKind.DEVICE_STANDBY, device=name, cause=new[name].reason)
        for name in [name for name in new if name not in job.learned.standby][:KEPT_STANDBYS]
    )
    standby = {name: every[name] for name in sorted(kept)}
    return replace(job, learned=replace(job.learned, standby=standby)), events


def _gist(reason: str) -> str:
    return _NUMBERS.sub("#", reason)


def restart_s(history: Sequence[PhaseChange]) -> float:
    """Seconds without training that this job's newest restart cost, without waiting for devices in between."""
    ended_s = began_s = stopped_s = None
    for change in reversed(history):
        if change.after is JobPhase.RUNNING and ended_s is None:
            ended_s = change.unix_s
        elif change.after is JobPhase.STARTING and ended_s is not None and began_s is None:
            began_s = change.unix_s
        elif change.after is JobPhase.QUEUED and began_s is not None and stopped_s is None:
            stopped_s = change.unix_s
        elif change.after is JobPhase.STOPPING and None not in (ended_s, began_s, stopped_s):
            assert ended_s is not None
            assert began_s is not None
            assert stopped_s is not None
            return min(max(ended_s - began_s + stopped_s - change.unix_s, 1.0), 120.0)
    return RESTART_S


# Devices that were taken in


def _growth(observed: ObservedJob, run: RunRecord, added: Sequence[str]) -> Growth | None:
    """Return the baseline for the grown run; None if the present run is not measured. Devices on trial stay on
    trial."""
    profile, trial = observed.training.profile, observed.job.learned.growth
    if trial is not None:
        return replace(trial, run=run.run, view=_view(observed), added=(*trial.added, *added))
    if profile is None or not is_measured(observed):
        return None
    return Growth(
        run=run.run,
        added=tuple(added),
        workers=len(run.members),
        samples_per_s=profile.total_batch / profile.step_s,
        total_batch=profile.total_batch,
        error=_error(profile),
        view=_view(observed),
    )


def _view(observed: ObservedJob) -> int:
    return observed.views.newest.view if observed.views.newest is not None else 0


def _error(profile: Profile) -> float:
    return max((rank.compute_error_s / rank.compute_s for rank in profile.ranks.values() if rank.compute_s), default=0)


def is_measured(observed: ObservedJob) -> bool:
    """Return True if the run has measured enough steps under its newest plan."""
    profile, plan = observed.training.profile, observed.plans.newest
    if profile is None or plan is None or profile.plan != plan.id or profile.step_s <= 0:
        return False
    return profile.steps >= STEADY_STEPS


def is_steady(observed: ObservedJob, run: RunRecord, clock: PassClock) -> bool:
    """Return True if the run has trained for a while under its newest plan, and every rank measured it."""
    long_enough = clock.now_s - max(observed.plans.planned_s, observed.since_s) >= STEADY_S
    profile = observed.training.profile
    return long_enough and is_measured(observed) and profile is not None and len(profile.ranks) == len(run.members)


def _compared(observed: ObservedJob, run: RunRecord, clock: PassClock) -> DeviceAssessment:
    """Holds a run that took devices in against the one before, once it is steady."""
    job, growth, profile = observed.job, observed.job.learned.growth, observed.training.profile
    if growth is None or (run.run, _view(observed)) <= (growth.run, growth.view):
        return DeviceAssessment(job=job)
    compared = replace(job, learned=replace(job.learned, growth=None))
    added = {f"{m.node}/{m.device}": m.rank for m in run.members if f"{m.node}/{m.device}" in growth.added}
    if not added or len(run.members) - len(added) < growth.workers:  # another run than was thought of
        return DeviceAssessment(job=compared)
    if profile is None or not is_steady(observed, run, clock):
        return DeviceAssessment(job=job)
    now, before = profile.total_batch / profile.step_s, growth.samples_per_s
    worth = _worth(profile, growth)
    rates = f"{before:.4g} → {now:.4g} samples/s"
    doubt = min(2 * math.hypot(growth.error, _error(profile)), CERTAIN_SLOWDOWN)
    if now * worth >= before * (1 - max(SLOWER, doubt)):
        text = f"grown from {growth.workers} to {len(run.members)} workers: {rates}"
        return DeviceAssessment(job=compared, events=(NewEvent(kind=EventKind.DEVICES_ASSESSED, cause=text),))
    dropped = _slowest_half(added, profile)
    if len(run.members) - len(dropped) < job.spec.min_workers:
        text = f"slower with {', '.join(added)} ({rates}), but fewer workers were not asked for"
        return DeviceAssessment(
            job=compared, events=(NewEvent(kind=EventKind.DEVICES_ASSESSED, level=Level.WARNING, cause=text),)
        )
    left = tuple(name for name in growth.added if name in added and name not in dropped)
    if left:
        growth = replace(growth, run=run.run, view=_view(observed), added=left)
        compared = replace(job, learned=replace(job.learned, growth=growth))
    return sent_back(observed, run, compared, dropped, f"the run was slower with it: {rates} measured")


def _worth(profile: Profile, growth: Growth) -> float:
    """Return the learning progress of a sample at the present total batch, relative to the earlier one."""
    if profile.noise is None:
        return 1.0
    noise = profile.noise.noise_scale
    return (noise + growth.total_batch) / (noise + profile.total_batch)


def _slowest_half(added: Mapping[str, int], profile: Profile) -> list[str]:
    """Half of them at once: the others are held against the same run again, and many are sorted out in few restarts."""

    def per_sample_s(name: str) -> float:
        rank = profile.ranks[added[name]]
        return rank.compute_s / max(rank.local_batch, 1)

    slowest_first = sorted(added, key=lambda name: (-per_sample_s(name), name))
    return slowest_first[: (len(added) + 1) // 2]


def sent_back(
    observed: ObservedJob, run: RunRecord, job: JobRecord, names: Sequence[str], why: str
) -> DeviceAssessment:
    """The run without these devices, which wait with that reason."""
    work = {worker.name: worker.work_per_s for worker in _workers(observed, run)}
    left = len(run.members) - len(names)
    new = {name: Standby(reason=why, work_per_s=work.get(name, 0.0), slowed=left) for name in names}
    job, events = stood_by(job, new, names)
    text = f"shrinking from {len(run.members)} to {left} workers: faster without {', '.join(names[:8])}"
    return DeviceAssessment(job=job, cause=Cause.SHRINK, names=tuple(names), text=text, events=events, judged=True)


# A worker that costs more than it brings


def _without_slowest(observed: ObservedJob, run: RunRecord, clock: PassClock) -> DeviceAssessment:
    """The run with and without its slowest worker, where the fixed costs of all are known."""
    job, profile = observed.job, observed.training.profile
    if job.spec.stages > 1:
        return DeviceAssessment(job=job, judged=True)  # its pipeline is of no use without it
    if profile is None or len(run.members) <= max(job.spec.min_workers, 1) or job.learned.growth is not None:
        return DeviceAssessment(job=job, judged=True)  # what was measured before a growth says more than a prediction
    found = dispensable(_question(observed, run, profile))
    if found is None:
        return DeviceAssessment(job=job, judged=True)
    member = run.members[found.rank]
    name = f"{member.node}/{member.device}"
    assessment = sent_back(observed, run, job, [name], found.reason)
    return _recorded(assessment, run, clock, found.planned, f"faster without {name}")
