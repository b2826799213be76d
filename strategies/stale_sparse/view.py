"""Line of `atoll status` about strategy `stale-sparse`."""

from __future__ import annotations

from atoll.strategies.declaration import Shown
from atoll.strategies.shared_params.measures import drift_of
from atoll.strategies.stale_sparse.plan import StaleSparsePlan
from atoll.strategies.stale_sparse.settings import StaleSparse


def status(shown: Shown) -> list[str]:
    """Return 'sparsity 99.50 %', 'stall 3.1 % of the step', 'fresh layers 71 %', 'drift 8.3 steps'."""
    assert isinstance(shown.settings, StaleSparse)
    planned = shown.planned.sparsity if isinstance(shown.planned, StaleSparsePlan) else None
    # The value that the first step will have, until a step is reported.
    begins_with = shown.settings.sparsity if planned is None else planned
    sparsity = shown.metrics.get("sparsity", begins_with)
    if not shown.metrics:
        return [f"sparsity {sparsity * 100:.2f} %"]
    soon = f" ({planned * 100:.2f} % soon)" if planned is not None and planned != sparsity else ""
    return [
        f"sparsity {sparsity * 100:.2f} %{soon}",
        f"stall {shown.metrics.get('stall_share', 0.0) * 100:.1f} % of the step",
        f"fresh layers {shown.metrics.get('fresh_share', 0.0) * 100:.0f} %",
        *drift_of(shown),
    ]
