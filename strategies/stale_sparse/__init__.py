"""Strategy `stale-sparse`: sparse updates with error feedback, applied while the next step already runs.

Source: StellaTrain (SIGCOMM '24), section 3. docs/strategies.md has the guarantees and their limits."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Metric, Strategy
from atoll.strategies.stale_sparse.plan import StaleSparsePlan
from atoll.strategies.stale_sparse.settings import StaleSparse

STRATEGY: Final = Strategy(
    name="stale-sparse",
    summary="the heaviest blocks travel while the next step runs: for islands with thin links between them",
    settings=StaleSparse,
    plan_parameters=StaleSparsePlan,
    metrics=(
        Metric("sparsity", "share", "of the entries, left out of this step", "newest"),
        Metric("stall_s", "s", "forward passes waiting for updates", "share of the step"),
        Metric("fresh_share", "share", "of layers that ran with the newest update"),
        Metric("sent_bytes", "bytes", "that left on the wire in this step"),
        Metric("select_s", "s", "of the training processors for choosing what is sent", "share of the step"),
        Metric("apply_s", "s", "of the training processors for summing and applying what came", "share of the step"),
    ),
    exchanges=True,
    worker="atoll.strategies.stale_sparse.worker:build",
    simulator="atoll.strategies.stale_sparse.simulate:StaleSparseSteps",
    controller="atoll.strategies.stale_sparse.controller:StaleSparseController",
    view="atoll.strategies.stale_sparse.view:status",
)
