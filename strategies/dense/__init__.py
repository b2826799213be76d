"""Strategy `dense`: every step all-reduces whole gradients."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Strategy, Traffic
from atoll.strategies.dense.settings import Dense

STRATEGY: Final = Strategy(
    name="dense",
    summary="every step all-reduces whole gradients: for a fast network",
    settings=Dense,
    switchable=True,
    steps_for_one=1.0,
    exchange=Traffic(kind="gradients"),
    worker="atoll.strategies.dense.worker:build",
    simulator="atoll.strategies.dense.simulate:DenseSteps",
)
