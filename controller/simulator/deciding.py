"""The controller's own deciding code as a policy: what a job's settings allow it to decide."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.controller.deciding.controller_half import controller_half
from atoll.controller.deciding.given import Given, Policy
from atoll.controller.deciding.next import next_plan
from atoll.controller.simulator.policies import Choice, Situation
from atoll.controller.simulator.scenario import Scenario
from atoll.controller.state.records import PlanRecord
from atoll.errors import NoFeasiblePlan
from atoll.strategies import registry


@dataclass(frozen=True, slots=True)
class Allowed:
    """split: "auto" or "inverse-time", as in a job file. batch: the total, within the scenario's range. parameters:
    whatever plans tell the strategy."""

    split: str = "auto"
    batch: bool = False
    parameters: bool = False


class Deciding:
    """`next_plan` of controller/deciding, with the plans that it made before."""

    splits_evenly = False

    def __init__(self, scenario: Scenario, allowed: Allowed) -> None:
        strategy = registry.find(scenario.strategy)
        self._allowed = allowed
        self._half = controller_half(strategy.name, scenario.strategy_settings.said())
        self._adapts = strategy.plan_parameters.adjustable() if allowed.parameters else ()
        self._current: PlanRecord | None = None

    def decide(self, given: Situation) -> Choice | None:
        asked = Given(
            now_s=given.now_s,
            planned_s=given.planned_s,
            current=self._record(given),
            profile=given.profile,
            policy=self._policy(given),
            islands=given.islands,
        )
        try:
            planned = next_plan(asked)
        except NoFeasiblePlan:
            return None
        if planned is None:
            return None
        self._current = planned
        return Choice(
            batches=tuple(round(share) for share in planned.shares),
            params=planned.strategy_params,
            planner=planned.planner,
            reason=planned.reason,
            predicted_s=planned.predicted_s,
            learning_rate_factor=planned.learning_rate_factor or 1.0,
        )

    def _record(self, given: Situation) -> PlanRecord:
        """The plan that `given.current` came from; a new one where a run began with it."""
        known = self._current
        if known is None or (known.run, known.id) != (given.run, given.plan):
            known = PlanRecord(
                run=given.run,
                id=given.plan,
                from_step=0,
                shares=tuple(float(batch) for batch in given.current.batches),
                planner=given.current.planner,
                reason=given.current.reason,
                input="",
                output="",
                strategy_params=given.current.params,
                total_batch=known.total_batch if known else 0,
                learning_rate_factor=given.current.learning_rate_factor,
            )
        return known

    def _policy(self, given: Situation) -> Policy:
        low, high = (given.candidates[0], given.candidates[-1]) if self._allowed.batch else (0, 0)
        return Policy(
            split=self._allowed.split,
            half=self._half,
            adapts=self._adapts,
            min_batch=low,
            max_batch=high,
            rule=given.rule,
            initial_batch=given.initial_batch,
            surrogate=given.surrogate,
        )
