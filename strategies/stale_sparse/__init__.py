"""Strategy `stale-sparse`: sparse updates with error feedback, applied while the next step already runs.

Source: StellaTrain (SIGCOMM '24), section 3. docs/strategies.md has the guarantees and their limits."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Strategy, Traffic
from atoll.strategies.shared_params.measures import METRICS
from atoll.strategies.stale_sparse.plan import StaleSparsePlan
from atoll.strategies.stale_sparse.settings import StaleSparse

STRATEGY: Final = Strategy(
    name="stale-sparse",
    summary="the heaviest blocks travel while the next step runs: for islands with thin links between them",
    settings=StaleSparse,
    plan_parameters=StaleSparsePlan,
    metrics=METRICS,
    exchanges=True,
    relayed=True,
    switchable=True,
    kept_state="shared parameters",
    steps_for_one=1.3,
    steps_range=(1.1, 1.5),
    exchange=Traffic(kind="updates", value_bytes=0.2578125, density=0.2),
    worker="atoll.strategies.stale_sparse.worker:build",
    script_check="atoll.strategies.stale_sparse.optimizer_rules:check_script",
    trial_settings={"staleness": 1},
    simulator="atoll.strategies.stale_sparse.simulate:StaleSparseSteps",
    controller="atoll.strategies.stale_sparse.controller:StaleSparseController",
    view="atoll.strategies.stale_sparse.view:status",
)
