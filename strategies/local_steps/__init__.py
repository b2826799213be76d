"""Strategy `local-steps`: islands apply their own updates at once and send differences of few bits through aggregators.

docs/strategies.md describes it, docs/performance.md what it learns for a byte."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Strategy, Traffic
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import LocalSteps
from atoll.strategies.shared_params.measures import METRICS

STRATEGY: Final = Strategy(
    name="local-steps",
    summary="islands move on by themselves and exchange few bits through aggregators: learns most in a step",
    settings=LocalSteps,
    plan_parameters=LocalStepsPlan,
    metrics=METRICS,
    exchanges=True,
    relayed=True,
    switchable=True,
    kept_state="shared parameters",
    steps_for_one=1.0,
    steps_range=(0.92, 1.3),
    exchange=Traffic(kind="differences", value_bytes=0.2578125, density=0.2),
    steps_of_plan="atoll.strategies.local_steps.controller:steps_of_plan",
    worker="atoll.strategies.local_steps.worker:build",
    script_check="atoll.strategies.shared_params.layout:check_script",
    controller="atoll.strategies.local_steps.controller:LocalStepsController",
    view="atoll.strategies.local_steps.view:status",
)
