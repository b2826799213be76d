"""Strategy `toy`: dense, times a strength that plans may change; it asks its scheduler one thing."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Metric, Strategy
from atoll.strategies.toy.plan import ToyMessage, ToyPlan
from atoll.strategies.toy.settings import Toy

STRATEGY: Final = Strategy(
    name="toy",
    summary="dense with a strength: shows what a strategy needs",
    settings=Toy,
    plan_parameters=ToyPlan,
    message=ToyMessage,
    metrics=(Metric("toy_strength", "share", "of this step", "newest"), Metric("toy_s", "s", "spent playing")),
    worker="atoll.strategies.toy.worker:build",
    scheduler="atoll.strategies.toy.plan:ToyScheduler",
    simulator="atoll.strategies.toy.simulate:ToySteps",
    view="atoll.strategies.toy.view:status",
)
