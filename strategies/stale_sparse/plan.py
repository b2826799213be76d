"""Parameters that a plan gives strategy `stale-sparse`."""

from __future__ import annotations

from typing import Annotated

from atoll.strategies.declaration import ADJUSTABLE, PlanParameters
from atoll.strategies.stale_sparse.settings import Sparsity


class StaleSparsePlan(PlanParameters):
    """Settings in force from the plan's first step on, on all workers."""

    sparsity: Annotated[Sparsity | None, ADJUSTABLE] = None
