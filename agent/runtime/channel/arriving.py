"""Plans on their way from the agent into force: they come by the link, and all ranks agree on them in each step."""

from __future__ import annotations

from atoll.agent.runtime.plans.planned_step import planned_from_wire
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.agent.runtime.session.session import Session
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.v1.common_pb2 import LEVEL_WARNING


class Plans:
    """Used by the training thread alone."""

    def __init__(self, session: Session, schedule: PlanSchedule, lead: int) -> None:
        """lead: how many steps ahead this rank's loader cuts batches."""
        self._session, self._schedule = session, schedule
        self._lead = lead

    def start(self) -> None:
        """Collective. The longest lead of all ranks counts, so that a plan holds from the same step on each."""
        if self._session.group is not None:
            self._lead = max(lead for (lead,) in self._session.group.gather_rows([self._lead]))

    def take(self) -> None:
        """Take the plans that came since the last call."""
        for plan in self._session.link.take_plans(self._session.view) if self._session.link is not None else ():
            if self._session.plans_of_another:
                plan.strategy_params = ""
            try:
                planned = planned_from_wire(plan, registry.of(self._session.strategy))
                self._schedule.add(plan.id, plan.from_step, planned)
            except BadInput as error:
                self._session.notice(LEVEL_WARNING, f"rank {self._session.place.rank} refused a plan: {error}")

    def agree(self, step: int, plan_id: int) -> None:
        """Note that in step `step` all ranks agreed to have the plans up to `plan_id`."""
        self._schedule.agree(step, plan_id, self._lead)
        for refusal in self._schedule.take_refusals():
            if self._session.place.is_main:  # every rank refuses alike
                self._session.notice(LEVEL_WARNING, refusal)
