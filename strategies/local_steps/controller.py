"""The controller half: as much is sent as links, devices and learning ask for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from atoll.controller.deciding.given import Given
from atoll.controller.deciding.split import following
from atoll.controller.deciding.stepping import expected_step_s, predicted
from atoll.controller.deciding.words import changed, mbit, percent
from atoll.controller.planners.exchange_density import Drift, ExchangeDensityInput, ExchangeDensityPlan
from atoll.controller.planners.registry import EXCHANGE_DENSITY, Decision
from atoll.controller.planners.wire_bytes import VALUE_BYTES
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import RankProfile
from atoll.strategies.local_steps.exchange_estimator import ExchangeEstimate, ExchangeEstimator
from atoll.strategies.local_steps.settings import RETURNED, LocalSteps

USED: Final = 0.7
"""Of a link's time in a step, that a plan fills; what fills between FILLED of it is left as it is."""
FILLED: Final = (0.6, 0.8)
ENOUGH: Final = 0.2
"""Two bits of more entries in every step teach nothing more (docs/performance.md, "What is learnt")."""
MOVED: Final = 1.15
"""Densities that differ by less are the same: thresholds and links are not known better."""
_WHY: Final = {
    "links": "as much as the thinnest link carries in {used:.0f} % of a step",
    "devices": "more would take the devices over a tenth of a step",
    "learning": "more teaches nothing",
    "drift": "less would leave more than {most:.3g} steps of updates unsent",
}


class LocalStepsController:
    """Of one job. See atoll.controller.deciding.controller_half."""

    def __init__(self, settings: LocalSteps) -> None:
        self._settings = settings

    def estimator(self) -> ExchangeEstimator:
        return ExchangeEstimator()

    def next_plan(self, given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
        """None while the present density is good enough, or nothing is known of the links."""
        asked = self._ask(given, ranks) if given.policy.may_change("density") else None
        if asked is None:
            return None
        now = float(given.current.strategy_params.get("density", self._settings.density))
        decision = EXCHANGE_DENSITY.decide(asked)
        if not moves(asked, now, decision.plan):
            return None
        now_s = expected_step_s(ranks, [rank.compute_s for rank in ranks])
        then_s = now_s + asked.exchange_s / asked.every * (decision.plan.density - now)
        return following(
            given,
            decision,
            strategy_params={**given.current.strategy_params, "density": round(decision.plan.density, 6)},
            reason=_reason(given, decision, now),
            measured_s=now_s,
            predicted_s=predicted(given.profile, max(now_s, asked.link_s(now)), max(then_s, decision.plan.link_s)),
        )

    def _ask(self, given: Given, ranks: Sequence[RankProfile]) -> ExchangeDensityInput | None:
        profile, islands = given.profile, sorted(set(given.islands))
        step_s = max(rank.compute_s for rank in ranks)
        if len(islands) < 2 or not profile.entries or not step_s > 0:
            return None
        if any(name not in profile.links for name in islands):
            return None
        seen = profile.of_strategy
        cost, drift = (seen.cost, seen.drift) if isinstance(seen, ExchangeEstimate) else (None, None)
        return ExchangeDensityInput(
            entries=profile.entries,
            bandwidths=tuple(profile.links[name].bandwidth_bps / 8 for name in islands),
            step_s=step_s,
            value_bytes=VALUE_BYTES[self._settings.values],
            enough=max(ENOUGH, self._settings.density),
            every=self._settings.every,
            returned=RETURNED,
            used=USED,
            exchange_s=cost.dense_s if cost is not None else 0.0,
            drift=Drift(steps=drift.drift, density=drift.density) if drift is not None else None,
        )


def moves(asked: ExchangeDensityInput, now: float, planned: ExchangeDensityPlan) -> bool:
    """Whether the present density fills links too little or too much, or costs devices too much."""
    if max(now, planned.density) < MOVED * min(now, planned.density):
        return False
    filled = asked.link_s(now) / asked.step_s
    return planned.held_by != "links" or not FILLED[0] <= filled <= FILLED[1]


def _reason(given: Given, decision: Decision[ExchangeDensityInput, ExchangeDensityPlan], now: float) -> str:
    """'bandwidth 95 → 20 Mbit/s: density 20.00 → 4.20 %, as much as the thinnest link carries in 70 % of a step; drift
    3 → 14.3 steps'."""
    link = mbit(min(decision.given.bandwidths) * 8)
    before = link
    if given.current.planner == EXCHANGE_DENSITY.name:
        before = mbit(min(EXCHANGE_DENSITY.read(given.current.input).bandwidths) * 8)
    moved = changed("density", percent(now), percent(decision.plan.density), " %")
    why = _WHY[decision.plan.held_by].format(used=100 * USED, most=decision.given.most_drift)
    return f"{changed('bandwidth', before, link, ' Mbit/s')}: {moved}, {why}{_drift(decision, now)}"


def _drift(decision: Decision[ExchangeDensityInput, ExchangeDensityPlan], now: float) -> str:
    """'; drift 3 → 14.3 steps', and what that means where it is more than it should be."""
    before, after = decision.given.drift_at(now), decision.given.drift_at(decision.plan.density)
    if before is None or after is None:
        return ""
    moved = changed("drift", f"{before:.3g}", f"{after:.3g}", " steps")
    return f"; {moved}{', islands learn late of each other' if after > decision.given.most_drift else ''}"
