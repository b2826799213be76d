"""The place of strategy `zen` in simulated time: all-reduces of what is dense, then the sums of what is sparse.

The links carry one after the other: a table's gradient is the last of a backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from atoll.controller.planners.batches.optperf import NodeModel
from atoll.controller.simulator.cluster import Cluster
from atoll.controller.simulator.devices import Computing
from atoll.controller.simulator.strategy_steps import Network, Params, PolicyMaker, Timed
from atoll.planning.sparse_scheme import EXACT, SparseSchemeInput, costs, densities_between
from atoll.strategies.dense.simulate import GRADIENT_BYTES, DenseSteps
from atoll.strategies.zen.settings import Zen

INDEX_BYTES: Final = 4
ROUND_LATENCY_S: Final = 0.0005
"""As workers count it."""


class ZenSteps:
    """See atoll.controller.simulator.strategy_steps. Between islands one rank of each takes part."""

    needs: ClassVar = ("sparse",)
    policies: ClassVar[Mapping[str, PolicyMaker]] = {}

    def __init__(self, cluster: Cluster, island_of: Sequence[str], begins_s: float) -> None:
        sparse, settings = cluster.scenario.sparse, cluster.scenario.strategy_settings
        assert sparse is not None  # the scenario was checked
        assert isinstance(settings, Zen)
        self._asked = None if settings.scheme == "auto" else settings.scheme
        self._overlap = cluster.scenario.overlap
        self._islands = sorted(set(island_of))
        several = len(self._islands) > 1
        circle = len(self._islands) if several else len(island_of)
        self._dense = DenseSteps(
            replace(cluster, entries=max(cluster.entries - sparse.rows * sparse.width, 1)), island_of, begins_s
        )
        self._given = SparseSchemeInput(
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
        timed, sums_s = self._dense.step(computing, params, network, rng), self._sums_s(network)
        return replace(
            timed,
            ends_s=timed.ends_s + sums_s,
            step_N=timed.step_N + sums_s,
            last_sync_N=timed.last_sync_N + sums_s,
        )

    def exact_s(self, computing: Computing, params: Params, network: Network) -> float:
        return self._dense.exact_s(computing, params, network) + self._sums_s(network)

    def optimum_s(self, total: int, nodes: Sequence[NodeModel], network: Network) -> float:
        return self._dense.optimum_s(total, nodes, network) + self._sums_s(network)

    def extra(self, total_batch: int, params: Params) -> float | None:
        return None

    def _sums_s(self, network: Network) -> float:
        """By the scheme that was asked for, or the cheapest, on the thinnest link."""
        mbit_s = float(self._overlap.mbit_s)
        if len(self._islands) > 1:
            mbit_s = min(network.links[name].at_mbit_s(network.now_s) for name in self._islands)
        found = costs(replace(self._given, bandwidth=max(mbit_s * 125_000, 1.0)))
        if self._asked is not None and self._asked in found:
            return found[self._asked]
        return min(found[scheme] for scheme in EXACT)
