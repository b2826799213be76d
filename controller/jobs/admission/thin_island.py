"""Leaves an island out of a running job while its link holds what all the others send. Pure.

Its devices wait as standbys, as a device does that was too slow: while the run has as many workers as without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.controller.jobs.admission.admitting import PAYBACK_S
from atoll.controller.jobs.admission.growing import DeviceAssessment, restart_s, sent_back
from atoll.controller.jobs.admission.one_island import island_times, measured_islands, uncertainty_of
from atoll.controller.jobs.lifecycle.observed import ObservedJob, PassClock
from atoll.controller.planners.exchange_density import ExchangeDensityInput
from atoll.controller.planners.registry import EXCHANGE_DENSITY, THIN_ISLAND, Decision
from atoll.controller.planners.thin_island import ThinIslandInput, ThinIslandPlan
from atoll.controller.state.records import RunRecord
from atoll.step_estimators.estimates import RankProfile

ThinIslandDecision = Decision[ThinIslandInput, ThinIslandPlan]


def without_thin_island(observed: ObservedJob, run: RunRecord, clock: PassClock) -> DeviceAssessment:
    """The run with and without the island of the thinnest link, once a plan has chosen what links bear. run: its
    members by position."""
    job, nothing = observed.job, DeviceAssessment(job=observed.job, judged=True)
    if job.spec.stages > 1 or job.learned.growth is not None or len({m.island for m in run.members}) < 3:
        return nothing
    by_island = measured_islands(observed, run, run.members, clock)
    exchange = None if by_island is None else _exchange(observed, sorted(by_island))
    if by_island is None or exchange is None:
        return nothing
    decision = THIN_ISLAND.decide(_asked(by_island, exchange, restart_s(job.status.history) / PAYBACK_S))
    left_out = [m for m in run.members if m.island == decision.plan.island]
    if not decision.plan.leaves or len(run.members) - len(left_out) < max(job.spec.min_workers, 1):
        return nothing
    names = [f"{m.node}/{m.device}" for m in left_out]
    return sent_back(observed, run, job, names, _reason(decision))


def _exchange(observed: ObservedJob, islands: Sequence[str]) -> ExchangeDensityInput | None:
    """What the newest plan of what islands send was made from, with the links as they are; None where there is none,
    or a link is not known."""
    plans = [plan for plan in observed.plans.issued if plan.planner == EXCHANGE_DENSITY.name]
    profile = observed.training.profile
    if not plans or profile is None or any(name not in profile.links for name in islands):
        return None
    links = tuple(profile.links[name].bandwidth_bps / 8 for name in islands)
    return EXCHANGE_DENSITY.read(plans[-1].input).model_copy(update={"bandwidths": links})


def _asked(
    by_island: Mapping[str, Sequence[RankProfile]], exchange: ExchangeDensityInput, cost: float
) -> ThinIslandInput:
    return ThinIslandInput(
        islands=tuple(island_times(name, ranks) for name, ranks in sorted(by_island.items())),
        exchange=exchange,
        uncertainty=uncertainty_of(by_island),
        cost=min(cost, 1.0),
    )


def _reason(decision: ThinIslandDecision) -> str:
    """'island c has 0.4 Mbit/s, and all send 1.20 % for it: a step's worth of learning takes 0.31 s with it, 0.2 s
    without it, when all send 20.00 %'."""
    given, planned = decision.given, decision.plan
    names = [one.name for one in given.islands]
    mbit = given.exchange.bandwidths[names.index(planned.island)] * 8 / 1e6
    return (
        f"island {planned.island} has {mbit:.3g} Mbit/s, and all send {100 * planned.density:.3g} % for it: a step's "
        f"worth of learning takes {planned.together_s:.3g} s with it, {planned.without_s:.3g} s without it, when all "
        f"send {100 * planned.density_without:.3g} %"
    )
