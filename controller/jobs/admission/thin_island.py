"""Leaves an island out of a running job while its link holds what all the others send. Pure.

Its devices wait as standbys, as a device does that was too slow: while the run has as many workers as without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.deciding.words import mbit
from atoll.controller.estimators.profile import Profile
from atoll.controller.jobs.admission.admitting import PAYBACK_S
from atoll.controller.jobs.admission.growing import JUDGE_EVERY_S, DeviceAssessment, is_measured, restart_s, sent_back
from atoll.controller.jobs.admission.one_island import island_times, measured_islands, uncertainty_of
from atoll.controller.jobs.model.observed import ObservedJob, PassClock
from atoll.controller.planners.islands.thin_island import ThinIslandInput, ThinIslandPlan
from atoll.controller.planners.registry import EXCHANGE_DENSITY, THIN_ISLAND, Decision
from atoll.controller.state.records import RunRecord

MAX_THIN_LINK_SHARE: Final = 0.5
"""Largest bandwidth of a thin link, as a share of the link among the others."""

MAX_HAND_OVER_S: Final = 20.0
"""Longest pause, in seconds, to send the unsent updates of an island that leaves. Over a thinner link the others
received little of its work."""
_ENTRY_BYTES: Final = 4

ThinIslandDecision = Decision[ThinIslandInput, ThinIslandPlan]


def without_thin_island(observed: ObservedJob, run: RunRecord, clock: PassClock) -> DeviceAssessment:
    """The run with and without the island of the thinnest link, once a plan has chosen what links bear. Also while such
    plans follow each other: what is computed does not depend on them. run: its members by position."""
    job, plans = observed.job, [plan for plan in observed.plans.issued if plan.planner == EXCHANGE_DENSITY.name]
    if not plans or job.spec.stages > 1 or job.learned.growth is not None or len({m.island for m in run.members}) < 3:
        return DeviceAssessment(job=job)
    if clock.now_s - observed.judged_s < JUDGE_EVERY_S or not is_measured(observed):
        return DeviceAssessment(job=job)
    nothing = DeviceAssessment(job=job, judged=True)
    by_island = measured_islands(observed, run.members)
    profile = observed.training.profile
    links = None if by_island is None or profile is None else _links(profile, sorted(by_island))
    if by_island is None or links is None:
        return nothing
    chosen = EXCHANGE_DENSITY.read(plans[-1].input)
    exchange = chosen.model_copy(update={"bandwidths": tuple(bps / 8 for bps in links)})
    decision = THIN_ISLAND.decide(
        ThinIslandInput.of_measured(
            islands=tuple(island_times(name, ranks) for name, ranks in sorted(by_island.items())),
            exchange=exchange,
            uncertainty=uncertainty_of(by_island),
            cost=min(restart_s(job.status.history) / PAYBACK_S, 1.0),
        )
    )
    left_out = [m for m in run.members if m.island == decision.plan.island]
    if not decision.plan.leaves or len(run.members) - len(left_out) < max(job.spec.min_workers, 1):
        return nothing
    names = [f"{m.node}/{m.device}" for m in left_out]
    hands_over_s = _hands_over_s(decision, len(run.members))
    if hands_over_s <= MAX_HAND_OVER_S:
        return sent_back(observed, run, job, names, _reason(decision))
    along = f"it takes along what it has not sent, which would be on its way for {hands_over_s:.0f} s"
    return replace(sent_back(observed, run, job, names, f"{_reason(decision)}; {along}"), keeps_unsent=True)


def _hands_over_s(decision: ThinIslandDecision, workers: int) -> float:
    """Return the seconds to send all unsent updates in full over all ranks' links: a ring is as fast as its thinnest
    link."""
    exchange = decision.given.exchange
    return 2 * (workers - 1) / workers * _ENTRY_BYTES * exchange.entries / min(exchange.bandwidths)


def _links(profile: Profile, islands: Sequence[str]) -> list[float] | None:
    """Bits a second; None where no island's link is clearly the thinnest. Whose is thin pairs tell, for whoever sends
    to it is held up as well. The others' is what they carry between themselves, its own the least of what islands were
    seen to send, by which plans go."""

    def reach(island: str, others: Sequence[str]) -> float:
        between = [(island, one) for one in others] + [(one, island) for one in others]
        return max((profile.paths.get(path, 0.0) for path in between if path[0] != path[1]), default=0.0)

    if any(name not in profile.links for name in islands):
        return None
    thin = min(islands, key=lambda name: reach(name, islands))
    others = [name for name in islands if name != thin]
    links = {name: reach(name, others) for name in others}
    if not 0 < reach(thin, others) <= MAX_THIN_LINK_SHARE * min(links.values()):
        return None
    links[thin] = min(profile.links[name].bandwidth_bps for name in islands)
    return [links[name] for name in islands]


def _reason(decision: ThinIslandDecision) -> str:
    """'island c has 0.4 Mbit/s, and all send 1.20 % for it: a step's worth of learning takes 0.31 s with it, 0.2 s
    without it, when all send 20.00 %'."""
    given, planned = decision.given, decision.plan
    names = [one.name for one in given.islands]
    link = mbit(given.exchange.bandwidths[names.index(planned.island)] * 8)
    return (
        f"island {planned.island} has {link} Mbit/s, and all send {100 * planned.density:.3g} % for it: a step's "
        f"worth of learning takes {planned.together_s:.3g} s with it, {planned.without_s:.3g} s without it, when all "
        f"send {100 * planned.density_without:.3g} %"
    )
