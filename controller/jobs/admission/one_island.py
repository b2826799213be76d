"""Tells a job's user where one island with all the data would be sooner than all islands together. Pure.

It only advises: where the data may be is not known here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.jobs.admission.growing import is_steady
from atoll.controller.jobs.model.members import members_of
from atoll.controller.jobs.model.observed import ObservedJob, PassClock
from atoll.controller.jobs.model.strategy_in_force import declared
from atoll.controller.planners.islands.one_island import MIN_SAVING, IslandTimes, OneIslandInput, OneIslandPlan
from atoll.controller.planners.registry import ONE_ISLAND, Decision
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import JobPhase, Level, OneIsland, PlanRecord, RunMember, RunRecord
from atoll.step_estimators.estimates import RankProfile
from atoll.strategies import registry
from atoll.strategies.declaration import Strategy, load

BESIDE_S: Final = 0.01
"""Stands for a step's boundary and its word to the agent, which nobody measures alone: rather too much."""
REPEAT_EVENT_FACTOR: Final = 2.0
"""Factor by which the advantage of one island must change for a new event."""

OneIslandDecision = Decision[OneIslandInput, OneIslandPlan]


@dataclass(frozen=True, slots=True)
class _Compared:
    decision: OneIslandDecision
    devices: int  # of the island


def advise(observed: ObservedJob, run: RunRecord, clock: PassClock) -> tuple[ObservedJob, tuple[NewEvent, ...]]:
    """The job with what its user is told, and the event where that is news: once, and again when it changes."""
    if observed.job.status.phase is not JobPhase.RUNNING or not observed.training.profile_is_news:
        return observed, ()
    before = observed.job.learned.one_island
    members = members_of(run, observed.views.newest)
    if len({member.island for member in members}) < 2:
        return _with(observed, None), ()  # a run on one island is what it may have been told of
    compared = _compare(observed, run, members, clock)
    if compared is None:
        return observed, ()
    planned = compared.decision.plan
    if before is None or not _says_the_same(before, compared.decision):
        if planned.sooner:
            told = OneIsland(
                island=planned.island,
                together_s=planned.together_s,
                alone_s=planned.alone_s,
                reason=_reason(observed, compared),
                input=compared.decision.input,
            )
            return _with(observed, told), (NewEvent(kind=EventKind.ADVICE, level=Level.WARNING, cause=told.reason),)
        if before is not None and planned.alone_s > planned.together_s:
            text = f"one island alone is no longer sooner: {_times(compared.decision)}"
            return _with(observed, None), (NewEvent(kind=EventKind.ADVICE, cause=text),)
    return observed, ()


def _with(observed: ObservedJob, told: OneIsland | None) -> ObservedJob:
    job = observed.job
    if job.learned.one_island == told:
        return observed
    return replace(observed, job=replace(job, learned=replace(job.learned, one_island=told)))


def _compare(observed: ObservedJob, run: RunRecord, members: Sequence[RunMember], clock: PassClock) -> _Compared | None:
    """None where steps cannot be compared (of pipelines the model may not fit into one island), or are not known."""
    profile, plan = observed.training.profile, observed.plans.newest
    strategy = registry.find(observed.strategy)
    if profile is None or plan is None or not strategy.steps_for_one or observed.job.spec.stages > 1:
        return None
    by_island = measured_islands(observed, members)
    if (
        by_island is None
        or not profile.step_s > 0
        or not is_steady(observed, replace(run, members=tuple(members)), clock)
    ):
        return None
    asked = OneIslandInput.of_measured(
        islands=tuple(island_times(name, of) for name, of in sorted(by_island.items())),
        step_s=profile.step_s,
        steps=_steps(observed, plan),
        beside_s=BESIDE_S,
        uncertainty=uncertainty_of(by_island),
    )
    decision = ONE_ISLAND.decide(asked)
    return _Compared(decision, len(by_island[decision.plan.island]))


def measured_islands(observed: ObservedJob, members: Sequence[RunMember]) -> dict[str, list[RankProfile]] | None:
    """The ranks of each island; None before all were measured under the newest plan."""
    profile, plan = observed.training.profile, observed.plans.newest
    if profile is None or plan is None:
        return None
    if observed.views.newest is not None and observed.views.newest.view != plan.view:
        return None
    by_island: dict[str, list[RankProfile]] = {}
    for number, member in enumerate(members):
        rank = profile.ranks.get(number)
        if rank is None or rank.plan != plan.id or rank.local_batch < 1 or not rank.compute_s > 0:
            return None
        by_island.setdefault(member.island, []).append(rank)
    return by_island


def uncertainty_of(by_island: Mapping[str, Sequence[RankProfile]]) -> float:
    """Return the largest relative error of the compute times."""
    return min(max(rank.compute_error_s / rank.compute_s for ranks in by_island.values() for rank in ranks), 10.0)


def island_times(name: str, ranks: Sequence[RankProfile]) -> IslandTimes:
    """Return an island's times if its devices share its work by their speeds."""
    batch = sum(rank.local_batch for rank in ranks)
    return IslandTimes.of_measured(
        name=name, batch=batch, compute_s=batch / math.fsum(rank.local_batch / rank.compute_s for rank in ranks)
    )


def _steps(observed: ObservedJob, plan: PlanRecord) -> float:
    """Steps for one of `dense`, at least: by the default settings, and as many more as a plan takes that sends less, or
    later. One where the strategy was not measured as it is set."""
    strategy, settings = declared(observed.job, observed.strategy)
    if settings != strategy.settings():
        return 1.0
    if not strategy.steps_of_plan:
        return _least_steps(strategy)
    more: float = load(strategy.steps_of_plan)(settings, strategy.plan_parameters(**plan.strategy_params))
    return _least_steps(strategy) * more


def _least_steps(strategy: Strategy) -> float:
    """Return the least steps for one of `dense`: fewer than one would be an advantage that no other task confirmed."""
    return max(1.0, strategy.steps_range[0])


def _says_the_same(before: OneIsland, decision: OneIslandDecision) -> bool:
    """Return True if the reported island is still the fastest, or nearly, by about as much."""
    planned = decision.plan
    its = [decision.given.alone_s(one) for one in decision.given.islands if one.name == before.island]
    if not planned.sooner or not its or its[0] * (1 - MIN_SAVING) > planned.alone_s:
        return False
    then, now = before.together_s / before.alone_s, planned.together_s / planned.alone_s
    return 1 / REPEAT_EVENT_FACTOR < now / then < REPEAT_EVENT_FACTOR


def _reason(observed: ObservedJob, compared: _Compared) -> str:
    """'one island with all the data would be sooner: lab alone takes 0.06 s for a step of 256 samples, all 4 islands
    together 0.8 s'."""
    given, among = compared.decision.given, ""
    if given.steps > 1:
        among += f" ({given.step_s:.3g} s a step, and {given.steps:.3g} of {observed.strategy} for one of dense)"
    if compared.devices > 1:
        among += f"; what its {compared.devices} devices need among themselves is not counted"
    return f"one island with all the data would be sooner: {_times(compared.decision)}{among}"


def _times(decision: OneIslandDecision) -> str:
    planned, islands = decision.plan, decision.given.islands
    batch = sum(one.batch for one in islands)
    alone = f"{planned.island} alone takes {planned.alone_s:.3g} s for a step of {batch} samples"
    return f"{alone}, all {len(islands)} islands together {planned.together_s:.3g} s"
