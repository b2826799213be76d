"""Policy of a job that leaves its strategy to the controller. Pure.

At launch nothing of the job is measured. It begins with the default strategy, or with the one whose steps wait for no
link, where measured links would hold a ring of whole gradients up. After a few steps planner `strategy` chooses. It is
asked again as long as the job trains, and a job changes its strategy at most MAX_SWITCHES times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.deciding.words import mbit
from atoll.controller.jobs.model.connectivity import relay_notice
from atoll.controller.jobs.model.members import members_of
from atoll.controller.jobs.model.observed import ObservedJob, PassClock
from atoll.controller.jobs.model.peer_links import PeerLinks
from atoll.controller.jobs.strategy.measuring import left_strategy, measured_run, strategy_input
from atoll.controller.planners.registry import STRATEGY, Decision
from atoll.controller.planners.strategy_choice.facts import StrategyInput
from atoll.controller.planners.strategy_choice.step_times import GRADIENT_BYTES
from atoll.controller.planners.strategy_choice.strategy import StrategyPlan
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import AdmissionRecord, JobPhase, JobRecord, Level, RunMember, RunRecord
from atoll.controller.state.views import ViewState
from atoll.strategies import registry

MAX_SWITCHES: Final = 5
"""Most changes of a job's strategy by the controller."""
MAX_ISLANDS: Final = 64
"""Islands whose links are compared, each with each other."""
SETTLES_S: Final = 3.0
"""Seconds that a view must have been in force before its strategy is compared."""
BEARABLE_SYNC_S: Final = 3.0
"""Longest ring of whole gradients, in seconds, with which a job begins."""
ASSUMED_ENTRIES: Final = 25_000_000
"""Parameters of a model whose size is not known yet."""
STATE_BYTES: Final = 12
"""Bytes of a parameter's state in checkpoints, with an optimizer of two moments."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The job with its choice, and what to record of it."""

    job: JobRecord
    events: tuple[NewEvent, ...] = ()
    decisions: tuple[AdmissionRecord, ...] = ()


def strategy_through_relay(job: JobRecord) -> str:
    """Return the strategy that decides which devices a waiting job may take: a job without a choice may begin by the
    one that needs no direct links."""
    return _first_choice(job) or job.wanted_strategy


def choose_at_launch(observed: ObservedJob, members: Sequence[RunMember]) -> tuple[JobRecord, tuple[NewEvent, ...]]:
    """Return the job with the strategy that its first run begins with. A later run begins with what was chosen."""
    job = observed.job
    first = _first_choice(job)
    reason = _why_not_whole_gradients(observed, members) if first else ""
    if not reason:
        return job, ()
    event = NewEvent(kind=EventKind.NOTICE, cause=f"begins by strategy {first}: {reason}")
    return replace(job, learned=replace(job.learned, strategy=first, strategy_reason=reason)), (event,)


def _first_choice(job: JobRecord) -> str:
    """Return the strategy that waits for no link, if the job may begin by it; empty if it was chosen otherwise."""
    if not job.leaves_strategy or job.learned.strategy or job.pinned.strategy:
        return ""
    traffic = {each.name: each.exchange for each in registry.strategies().values() if each.exchange is not None}
    first = next((name for name, exchange in traffic.items() if exchange.kind == "differences"), "")
    return "" if first in job.learned.refused_strategies else first


def _why_not_whole_gradients(observed: ObservedJob, members: Sequence[RunMember]) -> str:
    """Return why a run of these members should not begin with whole gradients; empty if it may."""
    if relay_notice(members):
        return "links between its islands go through the relay, which whole gradients do not"
    thinnest = _thinnest(observed.peer_links, {member.node: member.island for member in members})
    if thinnest is None:
        return ""
    source, target, bps = thinnest
    known = observed.job.learned.shared_bytes // STATE_BYTES
    entries = known or ASSUMED_ENTRIES
    sync_s = 2 * (len(members) - 1) / len(members) * GRADIENT_BYTES * entries * 8 / bps
    if sync_s <= BEARABLE_SYNC_S:
        return ""
    size = f"gradients of {'' if known else 'perhaps '}{entries / 1e6:.3g} million parameters"
    return f"{size} would take {sync_s:.2g} s in each step over the {mbit(bps)} Mbit/s from {source} to {target}"


def _thinnest(links: PeerLinks, island_of: Mapping[str, str]) -> tuple[str, str, float] | None:
    """Return two islands and the bits a second from one to the other: the least that was measured."""
    between = ((link.bandwidth_bps, *pair) for pair, link in links.by_island(island_of).items() if pair[0] != pair[1])
    bps, source, target = min(between, default=(0.0, "", ""))
    return (source, target, bps) if source else None


def revise(observed: ObservedJob, run: RunRecord, clock: PassClock) -> StrategyChoice:
    """Choose again from what the run measured, if that is news and its view has settled."""
    job, view = observed.job, observed.views.newest
    nothing = StrategyChoice(job)
    if not job.leaves_strategy or job.pinned.strategy or job.status.phase is not JobPhase.RUNNING:
        return nothing
    if view is None or view.state is not ViewState.IN_FORCE or clock.now_s - observed.views.since_s < SETTLES_S:
        return nothing
    if observed.strategy != job.wanted_strategy or not observed.training.profile_is_news:
        return nothing
    members = members_of(run, view)
    islands = len({member.island for member in members})
    if islands > MAX_ISLANDS or (islands < 2 and observed.strategy == registry.default().name):
        return nothing  # one island has a fast network
    measured = measured_run(observed, members)
    if measured is None:
        return nothing
    given = strategy_input(observed, measured)
    decision = STRATEGY.decide(given)
    if decision.plan.strategy == observed.strategy:
        known = job.learned.strategy_judged or not given.links
        return nothing if known else _recorded(job, run, clock, decision)
    if job.learned.strategy_switches >= MAX_SWITCHES:
        return nothing
    left = left_strategy(observed, measured, given)
    switches = job.learned.strategy_switches + 1
    job = replace(job, learned=replace(job.learned, left_strategy=left, strategy_switches=switches))
    return _recorded(job, run, clock, decision, switches)


def _recorded(
    job: JobRecord,
    run: RunRecord,
    clock: PassClock,
    decision: Decision[StrategyInput, StrategyPlan],
    switches: int = 0,
) -> StrategyChoice:
    """Return the choice with its record. A change has an event of its own once it is made. switches: changes of the
    job's strategy with this one, 0 if it stays."""
    plan, number = decision.plan, job.status.admissions + 1
    record = AdmissionRecord(
        id=number,
        run=run.run,
        unix_s=clock.unix_s,
        planner=STRATEGY.name,
        reason=plan.reason,
        input=decision.input,
        output=decision.output,
    )
    events: tuple[NewEvent, ...] = ()
    if not switches:
        events = (NewEvent(kind=EventKind.NOTICE, cause=f"strategy {plan.strategy} stays: {plan.reason}"),)
    elif switches == MAX_SWITCHES:
        text = f"strategy {plan.strategy} is the last that the controller chooses: {MAX_SWITCHES} changes are enough"
        events = (NewEvent(kind=EventKind.NOTICE, level=Level.WARNING, cause=text),)
    learned = replace(job.learned, strategy=plan.strategy, strategy_reason=plan.reason, strategy_judged=True)
    job = replace(job, learned=learned, status=replace(job.status, admissions=number))
    return StrategyChoice(job, events, (record,))
