"""Numbers that workers with shared parameters report for every step."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Metric, Shown

METRICS: Final = (
    Metric("sparsity", "share", "of the entries, left out of this step", "newest"),
    Metric("stall_s", "s", "forward passes waiting for updates", "share of the step"),
    Metric("fresh_share", "share", "of layers that ran with the newest update"),
    Metric("sent_bytes", "bytes", "that left on the wire in this step"),
    Metric("select_s", "s", "of the training processors for choosing what is sent", "share of the step"),
    Metric("apply_s", "s", "of the training processors for summing and applying what came", "share of the step"),
    Metric("drift", "count", "steps' worth of its own updates that a worker has not sent, where updates are exchanged"),
    Metric("round_s", "s", "from this worker's part of a sync round to the shared parameters that have all", "mean"),
    Metric("islands", "count", "whose updates a sync round has: all of the run", "newest"),
    Metric(
        "advantage",
        "count",
        "of a worker's own weights on its own data: by so much the shared model's loss there has a larger logarithm",
    ),
    Metric("every", "count", "steps between two exchanges of one entry", "newest"),
)


def drift_of(shown: Shown) -> list[str]:
    """Return 'drift 8.3 steps'; nothing where the drift is not known."""
    drift = shown.metrics.get("drift", 0.0)
    return [f"drift {drift:.3g} steps"] if drift > 0 else []
