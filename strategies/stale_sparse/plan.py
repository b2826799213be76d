"""Parameters that a plan gives strategy `stale-sparse`."""

from __future__ import annotations

from typing import Annotated

from atoll.strategies.declaration import Flag, PlanParameters
from atoll.strategies.stale_sparse.settings import Sparsity


class StaleSparsePlan(PlanParameters):
    """Parameters in force from the plan's first step on, on all workers."""

    sparsity: Annotated[Sparsity | None, Flag("SHARE", "of each gradient left out of a step, e.g. 0.995")] = None
    """share of the entries a step leaves behind"""
