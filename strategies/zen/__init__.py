"""Strategy `zen`: the exact gradient of the whole batch, of sparse tensors by their non-zeros alone.

Source: Zen (Wang et al., 2023). docs/strategies.md has the guarantees and their limits."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Metric, Strategy, Traffic
from atoll.strategies.zen.settings import Zen

STRATEGY: Final = Strategy(
    name="zen",
    summary="`dense`, but of sparse gradients (embeddings) the non-zeros alone travel: for large tables, exact",
    settings=Zen,
    metrics=(
        Metric("density", "share", "of the sparse tensors' units, of which this rank had a gradient", "newest"),
        Metric("density_of_all", "share", "of them, of which any rank had one", "newest"),
        Metric("sent_bytes", "bytes", "that left on the wire in this step"),
    ),
    exchanges=True,
    relayed=True,
    switchable=True,
    steps_for_one=1.0,
    exchange=Traffic(kind="nonzeros"),
    worker="atoll.strategies.zen.worker:build",
    sparse_gradients=True,
    simulator="atoll.strategies.zen.simulate:ZenSteps",
    view="atoll.strategies.zen.view:status",
)
