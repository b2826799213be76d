"""Controller half: plans send as much as links, devices and learning allow. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from atoll.controller.deciding.cost_model import expected_step_s, predicted_step_s
from atoll.controller.deciding.given import Given, plan_after
from atoll.controller.deciding.words import changed, mbit, percent
from atoll.controller.planners.islands.exchange_density import (
    Drift,
    ExchangeDensityInput,
    ExchangeDensityPlan,
    HeldBy,
    steps_for_one_at,
)
from atoll.controller.planners.islands.wire_bytes import VALUE_BYTES
from atoll.controller.planners.registry import EXCHANGE_DENSITY, Decision
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import RankProfile
from atoll.strategies.local_steps.exchange_estimator import ExchangeEstimate, ExchangeEstimator
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import RETURNED, LocalSteps

USED: Final = 0.7
"""Share of a link's time in a step that a plan fills. A plan that fills between FILLED of it is not changed."""
FILLED: Final = (0.6, 0.8)
ENOUGH: Final = 0.2
"""Two bits of more entries in every step teach nothing more (docs/performance.md, "What is learnt")."""
RISES_AFTER_S: Final = 15.0
"""Seconds since the previous plan before more is sent. A link's first rate is that of its buffers, and all workers wait
for a link with too much to carry."""
MOVED: Final = 1.15
"""Factor below which two densities count as equal: thresholds and links are not known better."""
SURE: Final = 1.25
"""Factor to which the devices' time for a look at all entries is known."""
SPARE: Final = 0.15
"""Share of a step by which an exchange must be shorter than it may be before it counts as shorter for good."""
NOTHING_SEEN: Final = ExchangeEstimate(cost=None, drift=None)
_TOLD_FROM: Final = 1.05
_MOST_TOLD: Final = 4.6  # a hundred times
_WHY: Final = {
    "links": "as much as the thinnest uplink carries in {used:.0f} % of a step",
    "devices": "more would take the devices over a tenth of a step",
    "learning": "more teaches nothing",
    "given": "as it is pinned",
    "drift": "less would leave more than {most:.3g} steps of updates unsent",
}


MOST_EVERY: Final = 8
"""Turns, at most: as many taught as much on a thin link, twenty less (docs/performance.md, "What a link bears")."""


class LocalStepsController:
    """Controller half of one job. See atoll.controller.deciding.given."""

    def __init__(self, settings: LocalSteps) -> None:
        self._settings = settings

    def estimator(self) -> ExchangeEstimator:
        return ExchangeEstimator()

    def next_plan(self, given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
        """Return the next plan. None while the present pace is good enough, or nothing is known of the links."""
        may = frozenset(name for name in LocalStepsPlan.FOLLOWS if given.policy.may_change(name))
        now = LocalStepsPlan.model_validate(dict(given.current.strategy_params)).over_settings(self._settings)
        asked = self._ask(given, ranks, now, may) if may else None
        if asked is None:
            return None
        decision = EXCHANGE_DENSITY.decide(asked)
        after = _after(asked, now, decision.plan, may)
        rises = _shared(asked, after) > _shared(asked, now)
        if after == now or (rises and given.now_s - given.planned_s < RISES_AFTER_S):
            return None
        now_s = expected_step_s(ranks, [rank.compute_s for rank in ranks])
        before, then = _shared(asked, now), _shared(asked, after)
        then_s = (
            now_s + asked.exchange_s / asked.every * (then - before) + asked.scan_s * (1 / after.every - 1 / now.every)
        )
        return plan_after(
            given,
            decision,
            strategy_params={
                **given.current.strategy_params,
                **{name: getattr(after, name) for name in LocalStepsPlan.FOLLOWS if name in may},
            },
            reason=_reason(given, decision, now, after),
            measured_s=now_s,
            predicted_s=predicted_step_s(
                given.profile,
                max(now_s, _waited_s(asked, before, now.staleness)),
                max(then_s, _waited_s(asked, then, after.staleness)),
            ),
        )

    def _ask(
        self, given: Given, ranks: Sequence[RankProfile], now: LocalSteps, may: Collection[str]
    ) -> ExchangeDensityInput | None:
        profile, islands = given.profile, sorted(set(given.islands))
        step_s = max(rank.compute_s for rank in ranks)
        if len(islands) < 2 or not profile.entries or not step_s > 0:
            return None
        if any(name not in profile.links for name in islands):
            return None
        seen = profile.of_strategy if isinstance(profile.of_strategy, ExchangeEstimate) else NOTHING_SEEN
        every = 1 if "every" in may else now.every
        shared = now.density * every / now.every
        asked = ExchangeDensityInput.of_measured(
            entries=profile.entries,
            bandwidths=tuple(profile.links[name].bandwidth_bps / 8 for name in islands),
            step_s=step_s,
            value_bytes=VALUE_BYTES[now.values],
            enough=max(ENOUGH, self._settings.density),
            every=every,
            returned=RETURNED,
            used=USED,
            exchange_s=seen.cost.dense_s if seen.cost is not None else 0.0,
            drift=_drift_of(seen, every),
            scan_s=seen.scan_s or 0.0,
            most_every=max(MOST_EVERY, now.every) if "every" in may else every,
            density=None if "density" in may else shared,
            advantage=seen.advantage,
        )
        link_s = asked.link_s(shared)
        if "staleness" not in may or seen.round_s is None or link_s > FILLED[1] * step_s:
            return asked.model_copy(update={"most_staleness": now.staleness})  # on a full link it measures the queue
        return asked.model_copy(update={"beside_s": max(0.0, seen.round_s - link_s)})


def _after(
    asked: ExchangeDensityInput, now: LocalSteps, planned: ExchangeDensityPlan, may: Collection[str]
) -> LocalSteps:
    """Return the pace after this decision: the present one where it is nearly as good."""
    before, then = _shared(asked, now), planned.density * asked.every / planned.every
    moved = asked.density is None and moves(asked, before, then, planned.held_by)
    shared, every, staleness = then if moved else before, now.every, now.staleness
    looks_s, most_s = asked.scan_s / min(every, planned.every), asked.looked * asked.step_s
    if "every" in may and (moved or not most_s / SURE < looks_s < most_s * SURE):
        every = planned.every
    late = asked.late(shared)
    if "staleness" in may and asked.beside_s > 0 and not now.staleness - 1 - SPARE < late < now.staleness + SPARE / 3:
        staleness = planned.staleness
    gradients = now.gradients
    if (
        "gradients" in may and planned.at_shared_params
    ):  # for good: passes at the shared parameters do not measure the advantage
        gradients = "shared_params"
    density = round(shared * every / asked.every, 6)
    return now.model_copy(update={"density": density, "every": every, "staleness": staleness, "gradients": gradients})


def _shared(asked: ExchangeDensityInput, pace: LocalSteps) -> float:
    """Return the density of the pace if it had the fewest turns that are requested."""
    return pace.density * asked.every / pace.every


def _waited_s(asked: ExchangeDensityInput, density: float, staleness: int) -> float:
    """Return the least seconds of a step that the exchange allows."""
    link_s = asked.link_s(density)
    return max(link_s, (asked.beside_s + link_s) / max(1, staleness))


def _drift_of(seen: ExchangeEstimate, every: int) -> Drift | None:
    if seen.drift is None:
        return None
    return Drift.of_measured(steps=seen.drift.drift, density=seen.drift.density * every)


def moves(asked: ExchangeDensityInput, now: float, planned: float, held_by: HeldBy) -> bool:
    """Return True if the present density fills links too little or too much, or costs devices too much."""
    if max(now, planned) < MOVED * min(now, planned):
        return False
    filled = asked.link_s(now) / asked.step_s
    return held_by != "links" or not FILLED[0] <= filled <= FILLED[1]


def _reason(
    given: Given, decision: Decision[ExchangeDensityInput, ExchangeDensityPlan], now: LocalSteps, after: LocalSteps
) -> str:
    """Return the plan's reason.

    'bandwidth 95 → 20 Mbit/s: density 20.00 → 4.20 %, as much as the thinnest uplink carries in 70 % of a step; drift
    3 → 14.3 steps; others' updates up to 1 → 3 steps late, for an exchange takes 2.8; learning takes about 1.5 times
    the steps'."""
    asked = decision.given
    link = mbit(min(asked.bandwidths) * 8)
    before = link
    if given.current.planner == EXCHANGE_DENSITY.name:
        before = mbit(min(EXCHANGE_DENSITY.read(given.current.input).bandwidths) * 8)
    said = []
    if after.density != now.density:
        moved = changed("density", percent(now.density), percent(after.density), " %")
        why = _WHY[decision.plan.held_by].format(used=100 * USED, most=asked.most_drift)
        if _shared(asked, after) == _shared(asked, now):
            why = "as many bytes as before"
        said.append(f"{moved}, {why}{_drift(asked, _shared(asked, now), _shared(asked, after))}")
    if after.every != now.every:
        looked = f"a look at all of the model takes {100 * asked.scan_s / asked.step_s:.2g} % of a step"
        said.append(f"{changed('each entry every', now.every, after.every, ' steps')}, for {looked}")
    if after.staleness != now.staleness:
        takes = f"an exchange takes {asked.late(_shared(asked, after)):.2g}"
        moved = changed("others' updates up to", now.staleness, after.staleness, " steps late")
        said.append(f"{moved}, for {takes}")
    if after.gradients != now.gradients:
        times = f"{math.exp(min(asked.advantage or 0.0, _MOST_TOLD)):.2g}"
        said.append(
            f"gradients at the shared parameters, for on their own data islands' own weights have a loss {times} times "
            "smaller: what each learns there the others take back. One island with all the data may be sooner"
        )
    return f"{changed('bandwidth', before, link, ' Mbit/s')}: {'; '.join([*said, *told(after)])}"


def _drift(asked: ExchangeDensityInput, now: float, then: float) -> str:
    """Return '; drift 3 → 14.3 steps', and its consequence where it is more than it should be."""
    before, after = asked.drift_at(now), asked.drift_at(then)
    if before is None or after is None:
        return ""
    moved = changed("drift", f"{before:.3g}", f"{after:.3g}", " steps")
    return f"; {moved}{', islands learn late of each other' if after > asked.most_drift else ''}"


def steps_for_one(pace: LocalSteps) -> float:
    """Return the steps that teach as much as one step by the defaults; at least 1. Turns count as a step's bytes.

    The race measured it (docs/performance.md, "Late updates and turns") on one small model, so it is rather too low
    than too high."""
    return steps_for_one_at(pace.density / pace.every, pace.staleness)


def told(pace: LocalSteps) -> list[str]:
    """Return 'learning takes about 1.7 times the steps'; nothing below _TOLD_FROM."""
    steps = steps_for_one(pace)
    return [f"learning takes about {steps:.2g} times the steps"] if steps >= _TOLD_FROM else []


def steps_of_plan(settings: LocalSteps, planned: LocalStepsPlan | None) -> float:
    """Return `steps_for_one` of a job's newest plan."""
    return steps_for_one(settings if planned is None else planned.over_settings(settings))
