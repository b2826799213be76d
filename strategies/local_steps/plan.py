"""Parameters that a plan gives strategy `local-steps`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from atoll.strategies.declaration import Flag, PlanParameters
from atoll.strategies.local_steps.settings import Every, Gradients, LocalSteps, SentShare, Staleness


class LocalStepsPlan(PlanParameters):
    """Parameters in force from the plan's first step on, on all workers."""

    FOLLOWS: ClassVar = ("density", "every", "staleness", "gradients")

    density: Annotated[
        SentShare | None, Flag("SHARE", "of its entries that an island sends of what is due, e.g. 0.1")
    ] = None
    """share of its entries that an island sends of what is due"""

    every: Annotated[Every | None, Flag("STEPS", "between two exchanges of one entry, e.g. 4")] = None
    """steps between two exchanges of one entry"""

    staleness: Annotated[Staleness | None, Flag("STEPS", "that others' updates may be late, e.g. 4")] = None
    """steps that others' updates may be late"""

    gradients: Annotated[
        Gradients | None, Flag("own|shared_params", "whose weights gradients are taken at, e.g. shared_params")
    ] = None
    """whose weights gradients are taken at: an island's own, or the shared parameters'"""

    def over_settings(self, settings: LocalSteps) -> LocalSteps:
        """Return the settings under this plan."""
        return settings.model_copy(update=self.model_dump(exclude_none=True))
