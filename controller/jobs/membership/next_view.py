"""Decides what is next for the views of a run that trains: of what its record says and its workers report. Pure; may be
asked any number of times, by one leader after the other.

docs/membership.md has the rules in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.jobs.membership.life import changed_event, first_step_event, move_view
from atoll.controller.jobs.membership.proposing import NextMembers, ViewStep, propose
from atoll.controller.jobs.model.device_memory import overflows_in
from atoll.controller.jobs.model.exits import in_words as exit_in_words
from atoll.controller.jobs.model.exits import silent_s
from atoll.controller.jobs.model.failures import crashed
from atoll.controller.jobs.model.members import in_whole_pipelines, joiners, members_of, with_state
from atoll.controller.jobs.model.observed import ObservedJob, PassClock, ViewStage, WorkerViewReport
from atoll.controller.jobs.model.policy import begun_with
from atoll.controller.jobs.model.strategy_in_force import strategy_of, why_not_switchable
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import ExitRecord, Level, RunMember, RunRecord, WorkerExitKind
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState

BROKEN_S: Final = 1.0
"""Members that all lost touch, without one that is known to be lost: so long its end may still be on its way here."""
REPLACED_S: Final = 90.0
"""Seconds that members wait for replacements of lost ones, if the job needs more. Members do not give up by
themselves before that."""
STAND_STILL_S: Final = 10.0
"""A collective that was aborted comes back within this, or never."""
BOUNDARY_S: Final = 60.0
BOUNDARY_STEPS: Final = 20
FORMING_S: Final = 15.0
HANDED_S: Final = 60.0
"""Seconds to wait for the next piece of state that moves between members: over a thin link the whole takes minutes."""
FRUITLESS_VIEWS: Final = 4
"""Views in a row that came to no step, of the same members or in force, before the run is started again."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """A member of the newest view, as it is known to stand. `word`: None where its agent is away, or it says
    nothing."""

    member: RunMember
    has_state: bool
    word: WorkerViewReport | None
    silent: bool
    """True if its agent is connected and knows no report: it does not train by `atoll.init`, or not yet."""
    trained: bool

    @property
    def who(self) -> str:
        return f"rank {self.member.rank} on {self.member.node}"

    def is_in(self, stage: ViewStage) -> bool:
        return self.word is not None and self.word.stage is stage


def next_view(observed: ObservedJob, run: RunRecord, clock: PassClock) -> ViewStep:
    """Return at most one transition of the run's newest view, or the view after it. run: with every known exit."""
    newest = observed.views.newest
    if newest is None or newest.state is ViewState.ABANDONED:
        return ViewStep()
    gone = [member for member in members_of(run, newest) if member.exit is not None]
    trains = newest.stepped_unix_s and observed.views.broken_since_s is None
    if not gone and trains and not joiners(run, newest) and observed.strategy == observed.job.wanted_strategy:
        return ViewStep()  # it trains, as in nearly every pass over nearly every run
    reports = _member_reports(observed, run, newest)
    if any(member.exit and member.exit.kind is WorkerExitKind.FINISHED for member in gone):
        return _at_the_end(gone)
    if gone:
        return _without(observed, run, gone, reports, clock)
    unable = [one for one in reports if one.has_state and one.is_in(ViewStage.UNABLE)]
    if unable and newest.state is not ViewState.IN_FORCE and newest.cause is not ViewCause.LAUNCH:
        return ViewStep(again=f"{unable[0].who} cannot: {_why(unable[0])}")
    if step := _stuck(observed, run, newest, reports, clock):
        return step
    if step := _advanced(observed, newest, reports, clock):
        return step
    return _changed_at_boundary(observed, run, newest, reports, clock)


def _member_reports(observed: ObservedJob, run: RunRecord, view: ViewRecord) -> list[MemberReport]:
    found, states = [], set(with_state(view))
    for member in members_of(run, view):
        if member.exit is not None:
            continue
        worker = observed.workers.get(member.rank)
        word = worker.view_report if worker is not None else None
        silent, trained = worker is not None and word is None, worker is not None and worker.trained
        found.append(MemberReport(member, member.rank in states, word, silent, trained))
    return found


def _at_the_end(gone: Sequence[RunMember]) -> ViewStep:
    """Some have finished: nobody goes on in place. Where all who ended did so, it is the run's end."""
    if all(member.exit and member.exit.kind is WorkerExitKind.FINISHED for member in gone):
        return ViewStep()
    return ViewStep(again="ranks have finished")


def _without(
    observed: ObservedJob,
    run: RunRecord,
    gone: Sequence[RunMember],
    reports: Sequence[MemberReport],
    clock: PassClock,
) -> ViewStep:
    """Members were lost: the next view is of those who are left, if they can go on."""
    newest = observed.views.kept[-1]
    if observed.views.in_force is None:
        unable = [f"{one.who} cannot: {_why(one)}" for one in reports if one.is_in(ViewStage.UNABLE)]
        return ViewStep(again=unable[0] if unable else "not all of its workers have completed a step")
    states = [member for member in gone if member.rank in with_state(newest)]
    if own := [member for member in states if member.exit is not None and not from_outside(member.exit)]:
        return ViewStep(again=f"rank {own[0].rank} ended by itself")
    stages, wanted = observed.job.spec.stages, None
    if stages > 1:
        whole = in_whole_pipelines(run, newest, stages)
        if not whole:
            return ViewStep(again="no pipeline has all of its stages left")
        reports = [one for one in reports if one.member.rank in whole]
        wanted = len(reports)  # pipelines come back with a new run
    has_state = [one.member.rank for one in reports if one.has_state]
    if reason := _unfit(observed, newest, reports):
        return ViewStep(again=reason)
    members = [one.member for one in reports if one.has_state or _may_stay(one)]
    joined = _ready(observed, run, newest, observed.job.spec.max_workers - len(members))
    if len(members) + len(joined) < (least := observed.job.spec.min_workers):
        short = f"{len(members)} of at least {least} workers are left"
        if any(one.has_state and one.word is not None and not one.word.takes_in for one in reports):
            return ViewStep(again=short)
        since_s = observed.views.broken_since_s
        if since_s is not None and clock.now_s - since_s > REPLACED_S:
            return ViewStep(again=f"{short}, and none was ready in their stead within {REPLACED_S:.0f} s")
        return ViewStep(stands_still=True)
    whose = states or list(gone)
    asked = NextMembers(
        cause=ViewCause.LOSS if states else ViewCause.BROKEN,
        reason=f"rank {whose[0].rank} on {whose[0].node} {_ended(whose[0])}"
        + (f" and {len(whose) - 1} more" if len(whose) > 1 else ""),
        members=[*members, *joined],
        has_state=has_state,
        at_boundary=_at_boundary(newest, states, reports),
        wanted=wanted,
        lost=states,
        joined=joined,
        seen_unix_s=min(clock.unix_s - (_silence_s(observed, member, clock)) for member in whose),
    )
    return propose(observed, run, newest, asked, clock)


def _at_boundary(newest: ViewRecord, lost: Sequence[RunMember], reports: Sequence[MemberReport]) -> bool:
    """Return True if members leave for the next view at a boundary: no lost member's state counts, or the rest
    complete their step without it."""
    if not lost:
        return newest.at_boundary
    words = [one.word for one in reports if one.has_state and not one.is_in(ViewStage.BROKEN)]
    return bool(words) and all(word is not None and word.tolerates_loss_mid_step for word in words)


def from_outside(exit: ExitRecord) -> bool:
    """Return True if a worker was lost by no fault of its script: only such losses are continued in place."""
    if exit.kind is WorkerExitKind.SIGNALLED:
        return not crashed(exit)
    return exit.kind in (WorkerExitKind.LOST, WorkerExitKind.UNRESPONSIVE)


def _unfit(observed: ObservedJob, newest: ViewRecord, reports: Sequence[MemberReport]) -> str:
    """Return why the remaining members cannot continue in place; empty if they can."""
    survivors = [one for one in reports if one.has_state]
    if not survivors:
        return "nobody is left who has its state"
    for one in survivors:
        if one.is_in(ViewStage.UNABLE):
            return f"{one.who} cannot: {_why(one)}"
        if one.silent:
            return f"{one.who} does not train yet, or not by atoll.init"
        if one.trained:
            return f"{one.who} has trained already"
    if _fruitless(observed.views.kept) >= FRUITLESS_VIEWS:
        return f"{FRUITLESS_VIEWS} views in a row came to no step"
    return ""


def _fruitless(views: Sequence[ViewRecord]) -> int:
    """Newest views in a row without a step, that were in force or are of the members of the one before."""
    count = 0
    for view in reversed(views):
        if view.stepped_unix_s or view.cause is ViewCause.LAUNCH:
            break
        count += bool(view.in_force_unix_s) or view.cause is ViewCause.BROKEN
    return count


def _may_stay(one: MemberReport) -> bool:
    """Return True if the next view may include this member, which has no state yet."""
    return one.word is not None and one.word.stage not in (ViewStage.UNABLE, ViewStage.JOINING)


def _ready(observed: ObservedJob, run: RunRecord, newest: ViewRecord, room: int) -> list[RunMember]:
    """Workers that only wait to be taken in, no more than there is room for."""
    ready = []
    for member in joiners(run, newest):
        worker = observed.workers.get(member.rank)
        if worker is not None and worker.view_report is not None and worker.view_report.stage is ViewStage.READY:
            ready.append(member)
    return ready[: max(room, 0)]


def _stuck(
    observed: ObservedJob, run: RunRecord, newest: ViewRecord, reports: Sequence[MemberReport], clock: PassClock
) -> ViewStep | None:
    """Return the transition for a view that makes no progress although no member is known to be lost."""
    if observed.views.in_force is None:
        return None  # the run's first: its workers begin at their own pace
    if not (reason := _stuck_for(observed, run, newest, reports, clock)):
        return None
    if newest.state is ViewState.PROPOSED and not newest.at_boundary and _overdue(observed, newest, clock):
        return ViewStep(again=reason)
    if unfit := _unfit(observed, newest, reports):
        return ViewStep(again=unfit)
    members = [one.member for one in reports if one.has_state or _may_stay(one)]
    asked = NextMembers(
        cause=ViewCause.BROKEN,
        reason=reason,
        members=members,
        has_state=[one.member.rank for one in reports if one.has_state],
        seen_unix_s=clock.unix_s,
    )
    return propose(observed, run, newest, asked, clock)


def _stuck_for(
    observed: ObservedJob, run: RunRecord, newest: ViewRecord, reports: Sequence[MemberReport], clock: PassClock
) -> str:
    """Return why the newest view makes no progress; empty if it does, or still may."""
    broken = [one for one in reports if one.is_in(ViewStage.BROKEN) and one.word and one.word.view == newest.view]
    since_s = observed.views.broken_since_s
    away = any(one.word is None for one in reports)  # whose agent is: it will be back, or be lost
    if broken and since_s is not None and not away:
        if (full := overflows_in(observed, run, newest)) and len(broken) == len(reports):
            member, batch = full[0]
            return f"rank {member.rank} on {member.node} ran out of memory with {batch} samples"
        training = any(one.is_in(ViewStage.TRAINING) for one in reports)
        patience_s = STAND_STILL_S if training else BROKEN_S
        if clock.now_s - since_s > patience_s:
            return f"its members lost touch ({_why(broken[0])})"
    if newest.state is ViewState.IN_FORCE:
        return ""
    if failed := [one for one in reports if one.is_in(ViewStage.FAILED) and one.word and one.word.view == newest.view]:
        return f"view {newest.view} did not come about ({failed[0].who}: {_why(failed[0])})"
    if out := [one for one in reports if not one.has_state and one.is_in(ViewStage.UNABLE)]:
        return f"{out[0].who} cannot join ({_why(out[0])})"
    if not (late_s := _overdue(observed, newest, clock)):
        return ""
    if newest.state is ViewState.FORMING:
        late = [one for one in reports if one.word is None or not one.word.trains_in(newest.view)]
        return f"{_first(late)} did not come to train in view {newest.view} within {late_s:.0f} s"
    late = [one for one in reports if one.word is None or not one.word.left_for(newest.view)]
    what = "came to no step boundary" if newest.at_boundary else "did not stand still"
    return f"{_first(late)} {what} within {late_s:.0f} s"


def _overdue(observed: ObservedJob, newest: ViewRecord, clock: PassClock) -> float:
    """The deadline of the newest view's state, where it has passed; else 0."""
    if newest.state is ViewState.FORMING:
        limit_s = FORMING_S
    elif newest.at_boundary:
        step_s = observed.training.profile.step_s if observed.training.profile else 0.0
        limit_s = max(BOUNDARY_S, BOUNDARY_STEPS * step_s)
    else:
        limit_s = STAND_STILL_S
    since_s = observed.views.since_s
    if observed.views.handed_since_s > since_s and (newest.state is ViewState.FORMING or newest.at_boundary):
        since_s, limit_s = observed.views.handed_since_s, max(limit_s, HANDED_S)
    return limit_s if clock.now_s - since_s > limit_s else 0.0


def _advanced(
    observed: ObservedJob, newest: ViewRecord, reports: Sequence[MemberReport], clock: PassClock
) -> ViewStep | None:
    """The newest view in its next state, where its members say so."""
    words = [one.word for one in reports if one.word is not None]
    if len(words) < len(newest.ranks):
        return None
    match newest.state:
        case ViewState.PROPOSED if all(word.left_for(newest.view) for word in words):
            return ViewStep(views=(move_view(newest, ViewState.FORMING, "its members meet", clock.unix_s),))
        case ViewState.FORMING if all(word.trains_in(newest.view) for word in words):
            before = observed.views.in_force
            step = min(word.step for word in words)
            now = move_view(newest, ViewState.IN_FORCE, f"its members train, from step {step}", clock.unix_s)
            if by := _strategy_taken(observed, newest, words):
                refusal = next((word.refusal for word in words if word.refusal), "")
                return _by_another(observed, replace(now, step=step), by, refusal)
            over = (
                [move_view(before, ViewState.ABANDONED, f"view {newest.view} is in force", clock.unix_s)]
                if before
                else []
            )
            return ViewStep(views=(*over, replace(now, step=step)))
        case ViewState.IN_FORCE if not newest.stepped_unix_s and all(_stepped(word, newest) for word in words):
            stepped = replace(newest, stepped_unix_s=clock.unix_s)
            if newest.cause is ViewCause.LAUNCH:
                return ViewStep(views=(stepped,), events=(first_step_event(stepped),))
            level = Level.WARNING if len(words) == 1 else Level.INFO
            ways = [one.word.way for one in reports if one.word is not None and one.member.rank in newest.has_state]
            return ViewStep(views=(stepped,), events=(changed_event(stepped, ways, level),))
        case _:
            return None


def _stepped(word: WorkerViewReport, view: ViewRecord) -> bool:
    """Return True if the worker has completed a step in the view."""
    return word.view == view.view and (word.way.first_step_s > 0 or word.step > view.step)


def _changed_at_boundary(
    observed: ObservedJob, run: RunRecord, newest: ViewRecord, reports: Sequence[MemberReport], clock: PassClock
) -> ViewStep:
    """Workers that are ready are taken in, once all members train and have come to a step."""
    if newest.state is not ViewState.IN_FORCE or not newest.stepped_unix_s:
        return ViewStep()
    if not reports or not all(one.is_in(ViewStage.TRAINING) and not one.trained for one in reports):
        return ViewStep()
    if not (joined := _ready(observed, run, newest, observed.job.spec.max_workers - len(newest.ranks))):
        return _switched(observed, run, newest, reports, clock)
    names = ", ".join(f"rank {member.rank} on {member.node}" for member in joined[:8])
    members = [*members_of(run, newest), *joined]
    asked = NextMembers(
        cause=ViewCause.JOIN,
        reason=f"{names} joined",
        members=members,
        has_state=newest.ranks,
        at_boundary=True,
        keeps_unsent=True,  # nobody leaves
        wanted=max(newest.wanted, len(members)),
        joined=joined,
        seen_unix_s=clock.unix_s,
    )
    return propose(observed, run, newest, asked, clock)


def _switched(
    observed: ObservedJob, run: RunRecord, newest: ViewRecord, reports: Sequence[MemberReport], clock: PassClock
) -> ViewStep:
    """The view of the same members by the strategy that the job wants, if it is another and all can leave theirs."""
    job, wanted = observed.job, observed.job.wanted_strategy
    if wanted == observed.strategy or why_not_switchable(job, observed.strategy, wanted):
        return ViewStep()
    if not all(one.word is not None and one.word.takes_in for one in reports):
        return ViewStep()
    pinned = f"asked by {job.pinned.strategy_by or 'its user'}" if job.pinned.strategy else ""
    asked = NextMembers(
        cause=ViewCause.STRATEGY,
        reason=pinned or (job.learned.strategy_reason if job.leaves_strategy else "") or "the job's own strategy",
        members=members_of(run, newest),
        has_state=newest.ranks,
        at_boundary=True,
        strategy=wanted,
        seen_unix_s=clock.unix_s,
    )
    return propose(observed, run, newest, asked, clock)


def _strategy_taken(observed: ObservedJob, view: ViewRecord, words: Sequence[WorkerViewReport]) -> str:
    """Return the strategy by which all members train in place of the view's; empty if they train by that one."""
    found = {word.strategy for word in words}
    (by,) = found if len(found) == 1 else ("",)
    return by if by != strategy_of(observed.job, view) else ""


def _by_another(observed: ObservedJob, now: ViewRecord, by: str, refusal: str) -> ViewStep:
    """The view in force by the strategy that its members stay with.

    refusal: why their script does not allow the view's, which is asked for no more; empty if they could not change
    there, and it is proposed again."""
    job, before, wanted = observed.job, observed.views.in_force, now.strategy
    over = (
        [move_view(before, ViewState.ABANDONED, f"view {now.view} is in force", now.in_force_unix_s)] if before else []
    )
    views = (*over, replace(now, strategy=by, previous_strategy=""))
    current = observed.plans.newest
    plan = None
    if current is not None:  # its parameters are of the strategy that is not taken
        stays = replace(current, id=current.id + 1, from_step=0, reason=f"strategy {by} stays", predicted_s=0.0)
        begun = begun_with(job, by, stays)
        total, factor = current.total_batch, current.learning_rate_factor
        plan = replace(begun, total_batch=total, learning_rate_factor=factor)
    if not refusal:
        return ViewStep(views=views, plan=plan)
    learned = replace(job.learned, refused_strategies={**job.learned.refused_strategies, wanted: refusal})
    if job.leaves_strategy:
        learned = replace(learned, strategy=by, strategy_reason=f"the script does not allow {wanted}: {refusal}")
    job = replace(job, learned=learned, pinned=replace(job.pinned, strategy="", strategy_by=""))
    if job.wanted_strategy != by:
        job = replace(job, pinned=replace(job.pinned, strategy=by))
    event = NewEvent(
        kind=EventKind.STRATEGY_REFUSED, level=Level.WARNING, view=now.view, cause=refusal, strategies=(by, wanted)
    )
    return ViewStep(views=views, job=job, plan=plan, events=(event,))


def left_out(
    observed: ObservedJob, run: RunRecord, names: Sequence[str], reason: str, clock: PassClock, *, keeps_unsent: bool
) -> ViewStep:
    """The view without the workers on these devices ("node/device"), from a step boundary."""
    newest = observed.views.kept[-1]
    members = members_of(run, newest)
    stay = [member for member in members if f"{member.node}/{member.device}" not in names]
    asked = NextMembers(
        cause=ViewCause.LEAVE,
        reason=reason,
        members=stay,
        has_state=[member.rank for member in stay],
        at_boundary=True,
        keeps_unsent=keeps_unsent,
        wanted=len(stay),
        seen_unix_s=clock.unix_s,
    )
    return propose(observed, run, newest, asked, clock)


def _first(late: Sequence[MemberReport]) -> str:
    return late[0].who if late else "a worker"


def _why(one: MemberReport) -> str:
    return one.word.reason if one.word is not None and one.word.reason else "no reason given"


def _ended(member: RunMember) -> str:
    return exit_in_words(member.exit) if member.exit is not None else "is gone"


def _silence_s(observed: ObservedJob, member: RunMember, clock: PassClock) -> float:
    """Return for how long a lost member's node was silent; 0 for an ended process, which its agent reported at once."""
    if member.exit is None or member.exit.kind is not WorkerExitKind.LOST:
        return 0.0
    return silent_s(observed.nodes.get(member.node), clock) or 0.0
