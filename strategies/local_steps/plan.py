"""The parameters that a plan gives strategy `local-steps`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from atoll.strategies.declaration import Flag, PlanParameters
from atoll.strategies.local_steps.settings import SentShare


class LocalStepsPlan(PlanParameters):
    """Holds from the plan's first step on, on all workers."""

    FOLLOWS: ClassVar = ("density",)

    density: Annotated[
        SentShare | None, Flag("SHARE", "of its entries that an island sends of what is due, e.g. 0.1")
    ] = None
    """share of its entries that an island sends of what is due"""
