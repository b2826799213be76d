"""Simulated steps of strategy `stale-sparse`: sync rounds that travel beside the steps.

Legend of suffixes: N = ranks, J = islands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.controller.planners.islands.wire_bytes import VALUE_BYTES, UpdateTraffic, update_density
from atoll.controller.simulator.cluster import BYTES_PER_MBIT, Cluster
from atoll.controller.simulator.steps import Computing, Network, Params, StrategySteps, Timed
from atoll.strategies.stale_sparse.settings import StaleSparse


class StaleSparseSteps(StrategySteps):
    """Steps with staleness 1: step n begins on a rank once its own step n - 1 and every rank's round n - 2 are done.

    A round's bytes leave an island when its ranks have computed and the round before has left."""

    needs: ClassVar = ("learning.extra",)

    def __init__(self, cluster: Cluster, island_of: Sequence[str], begins_s: float) -> None:
        super().__init__(cluster, island_of, begins_s)
        self._entries, self._surrogate = cluster.entries, cluster.scenario.learning.extra
        settings = cluster.scenario.strategy_settings
        assert isinstance(settings, StaleSparse)
        self._value_bytes = VALUE_BYTES[settings.values]
        self._island_N: NDArray[np.int64] = np.array([self._islands.index(name) for name in island_of])
        ranks_J = np.bincount(self._island_N, minlength=len(self._islands)).astype(np.float64)
        self._part_J = ranks_J / ranks_J.sum()
        self._own_done_N = np.full(len(island_of), begins_s)
        self._rounds_done = deque([begins_s, begins_s], maxlen=2)
        self._link_free_J = np.full(len(self._islands), begins_s)

    def exact_s(self, computing: Computing, params: Params, network: Network) -> float:
        density = update_density(params["sparsity"], len(self._island_N))
        slowest_s = float((computing.all_N + density * computing.dense_N).max())
        if len(self._islands) == 1:
            return slowest_s
        rates = [network.links[name].at_mbit_s(network.now_s) * BYTES_PER_MBIT for name in self._islands]
        traffic = UpdateTraffic(self._entries, self._value_bytes, self._part_J, np.array(rates))
        return max(slowest_s, traffic.seconds(density))

    def extra(self, total_batch: int, params: Params) -> float | None:
        return None if self._surrogate is None else self._surrogate.at(params["sparsity"], total_batch)

    def step(self, computing: Computing, params: Params, network: Network, rng: np.random.Generator) -> Timed:
        starts_N = np.maximum(self._own_done_N, self._rounds_done[0])
        density = update_density(params["sparsity"], len(self._island_N))
        exchange_N = np.broadcast_to(density * computing.dense_N, starts_N.shape)
        done_N = starts_N + computing.all_N + exchange_N
        traffic = UpdateTraffic(self._entries, self._value_bytes, self._part_J, np.ones(len(self._islands)))
        sent_J, received_J = traffic.carried(density)
        begin_J = np.array([done_N[self._island_N == j].max() for j in range(len(self._islands))])
        begin_J = np.maximum(begin_J, self._link_free_J)
        left_J, through_J = begin_J.copy(), begin_J.copy()
        for j, name in enumerate(self._islands):
            if sent_J[j] > 0:
                left_J[j] = network.links[name].ends_s(float(begin_J[j]), float(sent_J[j]))
                through_J[j] = max(left_J[j], network.links[name].ends_s(float(begin_J[j]), float(received_J[j])))
        self._link_free_J = through_J
        self._rounds_done.append(float(through_J.max()))
        before_N, self._own_done_N = self._own_done_N, done_N
        return Timed(
            ends_s=float(done_N.max()),
            step_N=done_N - before_N,
            stall_N=starts_N - before_N,
            sent_J=np.array(sent_J),
            busy_J=left_J - begin_J,
            exchange_N=exchange_N,
        )
