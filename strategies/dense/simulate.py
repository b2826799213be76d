"""Simulated steps of strategy `dense`: all-reduces that overlap the backward pass.

Legend of suffixes: N = ranks, J = islands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from atoll.controller.planners.batches.optperf import NodeModel, OptPerfInput, Overlap, plan_optperf
from atoll.controller.simulator.cluster import BYTES_PER_MBIT, Cluster
from atoll.controller.simulator.steps import Computing, Network, Params, StrategySteps, Timed

GRADIENT_BYTES: Final = 4
"""Bytes of an entry, in float32."""


class DenseSteps(StrategySteps):
    """Steps whose all-reduces run in buckets beside the backward pass."""

    def __init__(self, cluster: Cluster, island_of: Sequence[str], begins_s: float) -> None:
        super().__init__(cluster, island_of, begins_s)
        self._entries, self._given = cluster.entries, cluster.scenario.overlap

    def step(self, computing: Computing, params: Params, network: Network, rng: np.random.Generator) -> Timed:
        sigma = self._given.noise
        noise = math.exp(sigma * rng.standard_normal() - sigma**2 / 2)
        return dense_step(computing, self._overlap(network, noise), network.now_s)

    def exact_s(self, computing: Computing, params: Params, network: Network) -> float:
        return dense_step(computing, self._overlap(network, 1.0), 0.0).ends_s

    def optimum_s(self, total: int, nodes: Sequence[NodeModel], network: Network) -> float:
        overlap = self._overlap(network, 1.0)
        return plan_optperf(OptPerfInput(total_batch=total, nodes=tuple(nodes), **dict(overlap))).step_time

    def _overlap(self, network: Network, noise: float) -> Overlap:
        bucket_bytes, mbit_s = self._given.bucket_mib * 2**20, self._mbit_s(network)
        seconds, last = ring_overlap(self._entries, bucket_bytes, self._ranks, mbit_s)
        return Overlap(gamma=self._given.gamma, t_o=noise * seconds * (1 - last), t_u=noise * seconds * last)


def dense_step(computing: Computing, overlap: Overlap, begins_s: float) -> Timed:
    """Return a step by Cannikin (2024), Eq. 7: every rank waits for the last bucket. That one waits for all backward
    passes and for the buckets before it, which wait for the first bucket of every rank."""
    first_N = computing.before_N + overlap.gamma * computing.backward_N
    others_done = first_N.max() + overlap.t_o
    last_begins_N = np.maximum(computing.all_N, others_done)
    step_s = float(last_begins_N.max()) + overlap.t_u
    return Timed(
        ends_s=begins_s + step_s,
        step_N=np.full(len(first_N), step_s),
        first_bucket_N=overlap.gamma * computing.backward_N,
        sync_N=others_done - first_N,
        last_sync_N=step_s - last_begins_N,
    )


def ring_overlap(entries: int, bucket_bytes: float, ranks: int, mbit_s: float) -> tuple[float, float]:
    """Return the seconds of a ring all-reduce of float32 gradients, and the last bucket's share of them.

    Equation: 2 (n - 1) / n * bytes / rate."""
    size = entries * GRADIENT_BYTES
    return 2 * (ranks - 1) / ranks * size / (mbit_s * BYTES_PER_MBIT), min(1.0, bucket_bytes / size)
