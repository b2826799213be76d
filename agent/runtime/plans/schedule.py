"""The schedule of plans: what holds at which step, the same on every rank.

Plans arrive from the link thread at different moments on different ranks; ranks agree in a collective which of them
all have, and only then does a plan get the step from which it holds. What a run cannot train is refused by every rank
at that same step: what held before it holds on, under the new plan's id."""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, replace
from typing import Final

from atoll.agent.runtime.plans.planned_step import PlannedStep, why_refused
from atoll.errors import BadInput
from atoll.jobs.job_spec import check_shares

MAX_WAITING: Final = 4096  # plans that came and are not agreed yet; ranks that train agree in every step
KEPT_STEPS: Final = 1000  # telemetry may still ask about steps this far back


@dataclass(frozen=True, slots=True)
class _Plan:
    id: int
    from_step: int
    planned: PlannedStep


class PlanSchedule:
    """The plans of one run. `add` may be called from any thread; `agree` in step order, alike on all ranks."""

    def __init__(self, world_size: int, first: PlannedStep | None = None, *, samples: int | None = None) -> None:
        """first: of the plan the run was launched with (id 1); without it plan 0 holds: an even split of the script's
        own batch at the strategy's own rate. samples: of the dataset, the largest total batch."""
        if world_size < 1:
            raise BadInput(f"world_size = {world_size} must be at least 1")
        self.world_size = world_size
        self._samples = samples
        self._lock = threading.Lock()
        self._waiting: dict[int, _Plan] = {}
        self._refusals: list[str] = []
        self._newest = self._agreed = 0
        # Ascending in both the step from which a plan holds and its id.
        self._holds_from: list[int] = [0]
        self._plans: list[_Plan] = [_Plan(0, 0, PlannedStep((1.0,) * world_size))]
        if first is not None:
            self._newest = self._agreed = 1
            self._put(_Plan(1, 0, self._checked(1, 0, first)), 0)

    def add(self, plan_id: int, from_step: int, planned: PlannedStep) -> None:
        """A plan arrived. Repeats and plans in force are no news; other content under a waiting id is refused."""
        plan = _Plan(plan_id, from_step, self._checked(plan_id, from_step, planned))
        with self._lock:
            known = self._waiting.get(plan_id)
            if known is None and plan_id > self._agreed:
                if len(self._waiting) >= MAX_WAITING:
                    raise BadInput(f"plan {plan_id} is refused: {MAX_WAITING} plans already wait to be agreed")
                self._waiting[plan_id] = plan
                while self._newest + 1 in self._waiting:
                    self._newest += 1
            elif known is not None and known != plan:
                raise BadInput(f"plan {plan_id} arrived twice with different content; a plan never changes")

    def begin_view(self, world_size: int, plan_id: int, planned: PlannedStep, step: int) -> None:
        """Begin a view of `world_size` workers at `step`, whose first plan this is. Drop plans of the last view.

        Raises BadInput if these workers cannot train the plan; then no plan holds."""
        with self._lock:
            self.world_size = world_size
            plan = _Plan(plan_id, step, self._checked(plan_id, step, planned))
            if (refused := why_refused(plan.planned, world_size, self._samples)) is not None:
                raise BadInput(f"plan {plan_id} of {world_size} workers cannot be trained: {refused}")
            self._waiting.clear()
            self._newest = self._agreed = plan_id
            self._put(plan, step)

    def newest_contiguous(self) -> int:
        """The highest n such that plans 1..n are here; what this rank brings to the agreement."""
        with self._lock:
            return self._newest

    def agree(self, step: int, plan_id: int, lead: int) -> None:
        """Note that in step `step` all ranks agreed to have the plans up to `plan_id`.

        Each newly agreed plan holds from max(from_step, step + 1 + lead); where several hold, the highest id wins.
        lead: how many steps ahead loaders cut batches (Loader.lead), the same on all ranks."""
        if step < 0 or lead < 0:
            raise BadInput(f"step = {step} and lead = {lead} must be 0 or more")
        with self._lock:
            if plan_id > self._newest:
                raise BadInput(f"the ranks agreed on plan {plan_id}, but this one has only 1..{self._newest}")
            while self._agreed < plan_id:
                self._agreed += 1
                plan = self._waiting.pop(self._agreed)
                self._put(plan, max(plan.from_step, step + 1 + lead))
            self._forget_before(step - KEPT_STEPS)

    def take_refusals(self) -> list[str]:
        """Return why agreed plans since the last call cannot be trained. The same on every rank."""
        with self._lock:
            refusals, self._refusals = self._refusals, []
        return refusals

    def planned_at(self, step: int) -> PlannedStep:
        """Return the plan of `step`, final for steps up to agreed step + lead. Strategy parameters that no plan sets
        are None: the job's settings hold."""
        return self._at(step).planned

    def plan_at(self, step: int) -> int:
        """The id of the plan that holds at `step`; 0 is the even split before any plan."""
        return self._at(step).id

    def _at(self, step: int) -> _Plan:
        with self._lock:
            index = bisect.bisect_right(self._holds_from, step) - 1
            if index < 0:
                raise BadInput(f"step {step} is gone: the schedule begins at step {self._holds_from[0]}")
            return self._plans[index]

    def _put(self, plan: _Plan, holds_from: int) -> None:
        before = self._plans[-1].planned
        refused = why_refused(plan.planned, self.world_size, self._samples)
        if refused is not None:
            self._refusals.append(f"plan {plan.id} cannot be trained: {refused}. What held before it holds on")
            # A plan that waits for its own step must not come earlier for that.
            plan, holds_from = replace(plan, planned=before), max(holds_from, self._holds_from[-1])
        else:
            params = plan.planned.params
            if type(params) is type(before.params):  # else of another strategy
                params = params.over(before.params)
            plan = replace(plan, planned=replace(plan.planned, params=params))
        index = bisect.bisect_left(self._holds_from, holds_from)
        # Plans from here on have lower ids: they would never hold again.
        del self._holds_from[index:], self._plans[index:]
        self._holds_from.append(holds_from)
        self._plans.append(plan)

    def _forget_before(self, step: int) -> None:
        ended = bisect.bisect_right(self._holds_from, step) - 1
        if ended > 0:
            del self._holds_from[:ended], self._plans[:ended]

    def _checked(self, plan_id: int, from_step: int, planned: PlannedStep) -> PlannedStep:
        """The same with shares as floats. Raises BadInput for what makes no sense in any run."""
        if plan_id < 1 or from_step < 0:
            raise BadInput(f"plan {plan_id} from step {from_step}: ids begin at 1 and steps at 0")
        return replace(planned, shares=check_shares(planned.shares, self.world_size, f"plan {plan_id}"))
