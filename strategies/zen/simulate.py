"""Simulated steps of strategy `zen`: all-reduces of dense gradients, then the sums of sparse ones.

The links carry one after the other: a table's gradient is the last of a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from atoll.controller.planners.batches.optperf import NodeModel
from atoll.controller.simulator.cluster import BYTES_PER_MBIT, Cluster
from atoll.controller.simulator.steps import Computing, Network, Params, Timed
from atoll.planning.sparse_scheme import EXACT, SparseSchemeInput, costs, densities_between
from atoll.strategies.dense.simulate import GRADIENT_BYTES, DenseSteps
from atoll.strategies.zen.settings import Zen

INDEX_BYTES: Final = 4
ROUND_LATENCY_S: Final = 0.0005
"""Seconds of a round's latency, as workers count it."""


class ZenSteps(DenseSteps):
    """Steps of `dense` for the entries outside of tables, and the tables' sums after them."""

    needs: ClassVar = ("sparse",)

    def __init__(self, cluster: Cluster, island_of: Sequence[str], begins_s: float) -> None:
        sparse, settings = cluster.scenario.sparse, cluster.scenario.strategy_settings
        assert sparse is not None  # the scenario was checked
        assert isinstance(settings, Zen)
        self._scheme = settings.scheme
        dense_entries = max(cluster.entries - sparse.rows * sparse.width, 1)
        super().__init__(replace(cluster, entries=dense_entries), island_of, begins_s)
        circle = self._circle()
        self._sums = SparseSchemeInput(
            workers=circle,
            entries=sparse.rows,
            densities=densities_between(sparse.density, sparse.density_of_all, circle),
            skew=float(min(max(sparse.skew, 1.0), circle)),
            value_bytes=float(GRADIENT_BYTES * sparse.width),
            index_bytes=float(INDEX_BYTES),
            bandwidth=1.0,
            latency=ROUND_LATENCY_S,
            distinct=float(sparse.distinct),
        )

    def step(self, computing: Computing, params: Params, network: Network, rng: np.random.Generator) -> Timed:
        timed, sums_s = super().step(computing, params, network, rng), self._sums_s(network)
        return replace(
            timed,
            ends_s=timed.ends_s + sums_s,
            step_N=timed.step_N + sums_s,
            last_sync_N=timed.last_sync_N + sums_s,
        )

    def exact_s(self, computing: Computing, params: Params, network: Network) -> float:
        return super().exact_s(computing, params, network) + self._sums_s(network)

    def optimum_s(self, total: int, nodes: Sequence[NodeModel], network: Network) -> float:
        return super().optimum_s(total, nodes, network) + self._sums_s(network)

    def _sums_s(self, network: Network) -> float:
        """Return the seconds of the sums on the thinnest link, by the job's scheme or the cheapest."""
        found = costs(replace(self._sums, bandwidth=max(self._mbit_s(network) * BYTES_PER_MBIT, 1.0)))
        if self._scheme in found:
            return found[self._scheme]
        return min(found[scheme] for scheme in EXACT)
