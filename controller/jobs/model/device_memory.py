"""Reads and adds to what a job knows of its devices' memory: how many samples each of them holds at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.jobs.model.members import members_of
from atoll.controller.jobs.model.observed import ObservedJob, ViewStage
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import DeviceMemory, JobLearned, Level, PlanRecord, RunMember, RunRecord
from atoll.controller.state.views import ViewRecord
from atoll.step_estimators.estimates import RankProfile

MAX_OF_FAILED: Final = 0.9
"""Largest share of a batch that did not fit which may be tried next."""
MAX_WARNINGS: Final = 8
"""Warnings of one plan; more say nothing new."""
UNKNOWN: Final = DeviceMemory()


def name_of(member: RunMember) -> str:
    """Return the name of a member's device, as the job's records have it."""
    return f"{member.node}/{member.device}"


def after_training(known: DeviceMemory, profile: RankProfile) -> DeviceMemory:
    """Return what is known of a device once it has trained under this profile."""
    trained, measured = max(profile.local_batch, profile.trained_batch), profile.max_batch
    return replace(known, trained=max(known.trained, trained), measured=measured or known.measured)


def after_overflow(known: DeviceMemory, batch: int) -> DeviceMemory:
    """Return what is known of a device once its memory did not suffice for `batch` samples, at least 1.

    Next it may get as many as it trained, or half way from there to `batch`. A batch of a size that it trained before
    was of larger samples: then less by a tenth."""
    trained = known.trained if known.trained < batch else 0
    allowed = int(MAX_OF_FAILED * batch) if known.trained >= batch else (trained + batch) // 2
    allowed = max(trained, min(allowed, int(MAX_OF_FAILED * batch)))
    return DeviceMemory(
        trained=trained,
        measured=known.measured,
        failed=min(known.failed or batch, batch),
        allowed=max(min(known.allowed or allowed, allowed), 1),
        repeated=bool(known.failed) and batch >= known.failed,
    )


def with_overflows(learned: JobLearned, before: RunRecord, after: RunRecord) -> tuple[JobLearned, tuple[NewEvent, ...]]:
    """Lower the bounds of devices whose workers ended for lack of memory, with an event for each.

    before, after: the run without and with the newest ends of workers."""
    return _lowered(learned, _overflows(before, after))


def with_overflows_in_place(
    learned: JobLearned, observed: ObservedJob, run: RunRecord, view: ViewRecord
) -> tuple[JobLearned, tuple[NewEvent, ...]]:
    """Lower the bounds of devices whose workers say that memory did not suffice in this view."""
    return _lowered(learned, overflows_in(observed, run, view))


def overflows_in(observed: ObservedJob, run: RunRecord, view: ViewRecord) -> list[tuple[RunMember, int]]:
    """Return the members whose memory did not suffice in this view, each with the samples of its step."""
    found = []
    for member in members_of(run, view):
        worker = observed.workers.get(member.rank)
        word = worker.view_report if worker is not None else None
        if word is not None and word.view == view.view and word.overflow_batch and word.stage is ViewStage.BROKEN:
            found.append((member, word.overflow_batch))
    return found


def _overflows(before: RunRecord, after: RunRecord) -> Iterator[tuple[RunMember, int]]:
    if after is before:
        return
    for old, new in zip(before.members, after.members, strict=True):
        if old.exit is None and new.exit is not None and new.exit.overflow_batch:
            yield new, new.exit.overflow_batch


def _lowered(
    learned: JobLearned, overflows: Iterable[tuple[RunMember, int]]
) -> tuple[JobLearned, tuple[NewEvent, ...]]:
    memory, events = dict(learned.memory), []
    for member, batch in overflows:
        memory[name_of(member)] = known = after_overflow(memory.get(name_of(member), UNKNOWN), batch)
        events.append(_event(member, batch, known))
    return (replace(learned, memory=memory), tuple(events)) if events else (learned, ())


def _event(member: RunMember, batch: int, known: DeviceMemory) -> NewEvent:
    text = (
        f"{name_of(member)} ran out of memory with {batch} samples: plans give it at most {known.max_batch} from now on"
    )
    return NewEvent(kind=EventKind.NOTICE, level=Level.WARNING, cause=text)


def overfull(learned: JobLearned, members: Sequence[RunMember], plan: PlanRecord) -> tuple[NewEvent, ...]:
    """Return a warning for each device to which a user's plan gives more than its memory is known to hold."""
    total, events = plan.total_batch or learned.total_batch or learned.initial_batch, []
    for member, share in zip(members, plan.shares, strict=True):
        samples, most = total * share / sum(plan.shares) / plan.passes, learned.memory.get(name_of(member), UNKNOWN)
        if 0 < most.max_batch < samples:
            text = (
                f"{name_of(member)} is to train {samples:.0f} samples at once, and memory is known to hold "
                f"{most.max_batch}. If it runs out, plans with fewer follow"
            )
            events.append(NewEvent(kind=EventKind.NOTICE, level=Level.WARNING, cause=text))
    return tuple(events[:MAX_WARNINGS])
