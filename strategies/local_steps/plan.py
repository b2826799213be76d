"""Parameters that a plan gives strategy `local-steps`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from atoll.strategies.declaration import ADJUSTABLE, PlanParameters
from atoll.strategies.local_steps.settings import Every, Gradients, LocalSteps, SentShare, Staleness


class LocalStepsPlan(PlanParameters):
    """Settings in force from the plan's first step on, on all workers."""

    FOLLOWS: ClassVar = ("density", "every", "staleness", "gradients")

    density: Annotated[SentShare | None, ADJUSTABLE] = None
    every: Annotated[Every | None, ADJUSTABLE] = None
    staleness: Annotated[Staleness | None, ADJUSTABLE] = None
    gradients: Annotated[Gradients | None, ADJUSTABLE] = None

    def over_settings(self, settings: LocalSteps) -> LocalSteps:
        """Return the settings under this plan."""
        return settings.model_copy(update=self.model_dump(exclude_none=True))
