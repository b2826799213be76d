"""Makes the record of a run's next view, with its first plan and its placement. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.jobs.membership.life import move_view
from atoll.controller.jobs.model.device_memory import name_of, with_overflows_in_place
from atoll.controller.jobs.model.members import by_position, in_order
from atoll.controller.jobs.model.observed import ObservedJob, PassClock
from atoll.controller.jobs.model.policy import begun_with, expected_total, pins_of, with_learned
from atoll.controller.jobs.model.replica_placement import first_placement
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import JobRecord, Level, PlacementRecord, PlanRecord, RunMember, RunRecord
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState
from atoll.errors import NoFeasiblePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStep:
    """Changes to write of a run's views. again: why the run cannot continue in place and must restart; then nothing
    else is set. stands_still: nothing to do, but the run has not ended. views: changed and new ones; a new one
    comes with its plan, the job with it, and a placement if its machines keep copies."""

    again: str = ""
    stands_still: bool = False
    views: tuple[ViewRecord, ...] = ()
    events: tuple[NewEvent, ...] = ()
    job: JobRecord | None = None
    plan: PlanRecord | None = None
    placement: PlacementRecord | None = None

    @property
    def nothing(self) -> bool:
        return not (self.again or self.views or self.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMembers:
    """Members of the next view, and the reason. wanted, keeps_unsent: as in ViewRecord; wanted None: as before.
    strategy: by which they train; None: as before. seen_unix_s: the last sign of life of the lost member."""

    cause: ViewCause
    reason: str
    members: Sequence[RunMember]
    has_state: Iterable[int]
    at_boundary: bool = False
    keeps_unsent: bool = False
    wanted: int | None = None
    strategy: str | None = None
    lost: Sequence[RunMember] = ()
    joined: Sequence[RunMember] = ()
    seen_unix_s: float = 0.0


def propose(
    observed: ObservedJob, run: RunRecord, before: ViewRecord, asked: NextMembers, clock: PassClock
) -> ViewStep:
    """The next view after `before`, the newest. What was not in force of those before it is abandoned."""
    members = in_order(asked.members, observed.devices.ports, observed.job.spec.stages)
    first = members[0]
    ports = observed.devices.ports.get(first.node)
    if not ports:
        return ViewStep(again="no node of those who are left offers a free port to meet at")
    current = observed.plans.newest
    assert current is not None  # with the run's first view came its first plan
    number, has_state = before.view + 1, frozenset(asked.has_state)
    # Against the last view in force, over those between that did not come about.
    pending = before.state is not ViewState.IN_FORCE
    # Members that have all left for another strategy have its state. A switch that was only proposed is proposed again
    # once the next view is in force.
    left = before.state is ViewState.FORMING and bool(before.strategy)
    strategy = asked.strategy or (before.strategy if left else observed.strategy)
    view = ViewRecord(
        job=run.job,
        run=run.run,
        view=number,
        state=ViewState.PROPOSED,
        cause=asked.cause,
        reason=asked.reason,
        ranks=tuple(member.rank for member in members),
        has_state=tuple(member.rank for member in members if member.rank in has_state),
        master_address=observed.nodes[first.node].record.address,
        master_port=min(ports),
        plan=current.id + 1,
        wanted=before.wanted if asked.wanted is None else asked.wanted,
        strategy=strategy,
        previous_strategy=observed.strategy if strategy != observed.strategy else "",
        at_boundary=asked.at_boundary,
        keeps_unsent=asked.keeps_unsent,
        lost=_named(before.lost if pending else (), asked.lost),
        joined=_named(before.joined if pending else (), asked.joined),
        seen_unix_s=before.seen_unix_s if pending and before.seen_unix_s else asked.seen_unix_s,
        proposed_unix_s=clock.unix_s,
    )
    job = with_learned(observed, observed.job)
    if asked.cause is ViewCause.STRATEGY and pins_of(job, strategy).shares and view.ranks == before.ranks:
        job = replace(job, pinned=replace(job.pinned, view=number))
    learned, overflows = with_overflows_in_place(job.learned, observed, run, before)
    job = replace(job, learned=learned, status=replace(job.status, view=number))
    same = view.ranks == before.ranks and not overflows
    plan = _first_plan(observed, job, run, view, current, same=same)
    over = [move_view(before, ViewState.ABANDONED, f"view {number} was proposed", clock.unix_s)] if pending else []
    event = NewEvent(
        kind=EventKind.VIEW_PROPOSED,
        level=Level.WARNING if asked.lost else Level.INFO,
        view=number,
        cause=view.reason,
        ranks=view.ranks,
        at_boundary=view.at_boundary,
    )
    return ViewStep(
        views=(*over, view), events=(*overflows, event), job=job, plan=plan, placement=_placement(observed, run, view)
    )


def _named(before: Sequence[str], new: Sequence[RunMember]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*before, *(f"rank {member.rank} on {member.node}" for member in new))))[:64]


def _first_plan(
    observed: ObservedJob, job: JobRecord, run: RunRecord, view: ViewRecord, current: PlanRecord, *, same: bool
) -> PlanRecord:
    """Return the plan that a view begins with. same: it has the members of the view before, in the same order."""
    if view.previous_strategy and same:  # the split and the batch stay: they are of the devices and the data
        reason = f"the split of plan {current.id} stays by strategy {view.strategy}"
        plan = begun_with(job, view.strategy, replace(current, reason=reason, predicted_s=0.0))
        total, factor = current.total_batch, current.learning_rate_factor
        plan = replace(plan, total_batch=total, learning_rate_factor=factor)
        return replace(plan, id=current.id + 1, view=view.view, from_step=0)
    members = by_position(run, view).members
    places, memory = [], job.learned.memory
    for member in members:
        device = observed.device_of(member)
        speed, work_per_s = (device.speed, device.work_per_s) if device else (1.0, 0.0)
        places.append(Place(member.node, member.device, speed, work_per_s, memory.get(name_of(member))))
    total = expected_total(job)
    plan = begun_with(job, view.strategy, first_plan(run.run, job.spec.split, places, job.learned.speeds, total))
    return replace(plan, id=current.id + 1, view=view.view)


def _placement(observed: ObservedJob, run: RunRecord, view: ViewRecord) -> PlacementRecord | None:
    members = by_position(run, view).members
    nodes = {member.node: observed.nodes[member.node].record for member in members}
    try:
        placed = first_placement(
            run.run,
            members,
            nodes,
            observed.job.spec.checkpoint,
            before=observed.plans.placement,
            links=observed.training.links,
            learned=observed.job.learned,
        )
    except NoFeasiblePlan:
        return None  # no machine's memory has room for a copy; the run's launch said so
    return None if placed is None else replace(placed, view=view.view)
