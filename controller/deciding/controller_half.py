"""The seam between the controller and the controller half of a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from atoll.controller.estimators.run import StepEstimator
from atoll.strategies import registry
from atoll.strategies.declaration import load

if TYPE_CHECKING:
    from atoll.controller.deciding.given import Given
    from atoll.controller.state.records import PlanRecord
    from atoll.step_estimators.estimates import RankProfile


class ControllerHalf(Protocol):
    """Made from a strategy's settings. Pure: time is an argument."""

    def estimator(self) -> StepEstimator | None:
        """Make the estimator of one run's steps for what only this strategy needs; None if it needs nothing."""
        ...

    def next_plan(self, given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
        """Return the plan after the present one; None if only the split of the batch is to be decided.

        ranks: all ranks, as measured under the present plan. Raises NoFeasiblePlan."""
        ...


def controller_half(strategy: str, settings: Mapping[str, Any]) -> ControllerHalf | None:
    """Make a strategy's controller half, None if it has none. settings: as recorded."""
    declared = registry.find(strategy)
    if not declared.controller:
        return None
    half: ControllerHalf = load(declared.controller)(declared.settings.model_validate(dict(settings)))
    return half
