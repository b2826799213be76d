"""The place of strategy `dense` in simulated time: all-reduces that overlap the backward pass.

Legend of suffixes: N = ranks, J = islands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import numpy as np

from atoll.controller.planners.batches.optperf import NodeModel, OptPerfInput, Overlap, plan_optperf
from atoll.controller.simulator.cluster import Cluster
from atoll.controller.simulator.devices import Computing
from atoll.controller.simulator.strategy_steps import Network, Params, PolicyMaker, Timed

GRADIENT_BYTES: Final = 4
"""Of an entry: float32."""


class DenseSteps:
    """See atoll.controller.simulator.strategy_steps."""

    needs: ClassVar = ()
    policies: ClassVar[Mapping[str, PolicyMaker]] = {}

    def __init__(self, cluster: Cluster, island_of: Sequence[str], begins_s: float) -> None:
        self._entries, self._given = cluster.entries, cluster.scenario.overlap
        self._ranks, self._islands = len(island_of), sorted(set(island_of))

    def step(self, computing: Computing, params: Params, network: Network, rng: np.random.Generator) -> Timed:
        sigma = self._given.noise
        noise = math.exp(sigma * rng.standard_normal() - sigma**2 / 2)
        return dense_step(computing, self._overlap(network, noise), network.now_s, len(self._islands))

    def exact_s(self, computing: Computing, params: Params, network: Network) -> float:
        return dense_step(computing, self._overlap(network, 1.0), 0.0, len(self._islands)).ends_s

    def optimum_s(self, total: int, nodes: Sequence[NodeModel], network: Network) -> float:
        overlap = self._overlap(network, 1.0)
        return plan_optperf(OptPerfInput(total_batch=total, nodes=tuple(nodes), **dict(overlap))).step_time

    def extra(self, total_batch: int, params: Params) -> float | None:
        return None

    def _overlap(self, network: Network, noise: float) -> Overlap:
        given = self._given
        if given.t_o is not None and given.t_u is not None:
            return Overlap(gamma=given.gamma, t_o=given.t_o * noise, t_u=given.t_u * noise)
        mbit_s = given.mbit_s
        if len(self._islands) > 1:
            mbit_s = min(network.links[name].at_mbit_s(network.now_s) for name in self._islands)
        seconds, last = ring_overlap(self._entries, given.bucket_mib * 2**20, self._ranks, mbit_s)
        return Overlap(gamma=given.gamma, t_o=noise * seconds * (1 - last), t_u=noise * seconds * last)


def dense_step(computing: Computing, overlap: Overlap, begins_s: float, islands: int) -> Timed:
    """Cannikin (2024), Eq. 7: every rank waits for the last bucket, which waits for all backward passes and for the
    buckets before it, which wait for everybody's first."""
    first_N = computing.before_N + overlap.gamma * computing.backward_N
    others_done = first_N.max() + overlap.t_o
    last_begins_N = np.maximum(computing.all_N, others_done)
    step_s = float(last_begins_N.max()) + overlap.t_u
    none_J = np.zeros(islands)
    return Timed(
        ends_s=begins_s + step_s,
        step_N=np.full(len(first_N), step_s),
        first_bucket_N=overlap.gamma * computing.backward_N,
        sync_N=others_done - first_N,
        last_sync_N=step_s - last_begins_N,
        stall_N=np.zeros(len(first_N)),
        sent_J=none_J,
        busy_J=none_J,
    )


def ring_overlap(entries: int, bucket_bytes: float, ranks: int, mbit_s: float) -> tuple[float, float]:
    """Seconds of a ring all-reduce of float32 gradients, 2 (n - 1) / n * bytes / rate, and the last bucket's share."""
    size = entries * GRADIENT_BYTES
    return 2 * (ranks - 1) / ranks * size / (mbit_s * 125_000), min(1.0, bucket_bytes / size)
