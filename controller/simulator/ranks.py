"""The ranks of one simulated run: how long their steps really take.

Legend of suffixes: N = ranks, J = islands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.controller.planners.optperf import OptPerfInput, Overlap, plan_optperf
from atoll.controller.planners.wire_bytes import Traffic
from atoll.controller.simulator.cluster import Cluster
from atoll.controller.simulator.devices import Computing, Device, Devices
from atoll.controller.simulator.links import Link
from atoll.controller.simulator.policies import Choice
from atoll.controller.simulator.rounds import VALUE_BYTES, SparseRounds, Timed, dense_step, ring_overlap


class Ranks:
    """Whoever is there from `begins_s` on. islands: their names, sorted; leaders: the rank that sends for each.

    Speeds and links may change; they are given at each step. links: by island, empty where there is one island.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[Device], begins_s: float) -> None:
        self._cluster = cluster
        self.devices = tuple(devices)
        self.bounds = tuple(device.bounds for device in devices)
        self.island_of = tuple(device.island for device in devices)
        self.islands = sorted(set(self.island_of))
        self.leaders = [self.island_of.index(name) for name in self.islands]
        self._island_N: NDArray[np.int64] = np.array([self.islands.index(name) for name in self.island_of])
        self._costs = Devices(devices)
        self._rounds = SparseRounds(self._island_N, self.islands, begins_s)

    def step(
        self,
        choice: Choice,
        now_s: float,
        speeds: Mapping[str, float],
        links: Mapping[str, Link],
        *,
        times_rng: np.random.Generator,
        network_rng: np.random.Generator,
    ) -> tuple[Computing, Timed]:
        """The next step, with noise."""
        computing = self._costs.drawn(choice.batches, self._speed_N(speeds), times_rng)
        if self._cluster.scenario.strategy == "stale-sparse":
            return computing, self._rounds.step(computing, links, self._cluster.entries, choice.rate)
        sigma = self._cluster.scenario.overlap.noise
        noise = math.exp(sigma * network_rng.standard_normal() - sigma**2 / 2)
        return computing, dense_step(computing, self._overlap(now_s, links, noise), now_s, len(self.islands))

    def exact_s(self, choice: Choice, now_s: float, speeds: Mapping[str, float], links: Mapping[str, Link]) -> float:
        """Seconds of a step without noise, if speeds and links stay as they are now."""
        computing = self._costs.exact(choice.batches, self._speed_N(speeds))
        if self._cluster.scenario.strategy == "dense":
            return dense_step(computing, self._overlap(now_s, links, 1.0), 0.0, len(self.islands)).ends_s
        slowest_s = float(computing.all_N.max())
        if len(self.islands) == 1:
            return slowest_s
        bandwidth_J = np.array([links[name].at_mbit_s(now_s) * 125_000 for name in self.islands])
        part_J = np.bincount(self._island_N) / len(self.island_of)
        return max(slowest_s, Traffic(self._cluster.entries, VALUE_BYTES, part_J, bandwidth_J).seconds(1 - choice.rate))

    def optimum_s(self, total: int, now_s: float, speeds: Mapping[str, float], links: Mapping[str, Link]) -> float:
        """Seconds of the best split's step without noise. 0 where `optperf` does not know it: of devices that saturate,
        and with strategy stale-sparse."""
        if self._cluster.scenario.strategy != "dense" or any(device.cost.floor for device in self.devices):
            return 0.0
        nodes = tuple(device.model(speeds[device.name]) for device in self.devices)
        overlap = self._overlap(now_s, links, 1.0)
        return plan_optperf(OptPerfInput(total_batch=total, nodes=nodes, **dict(overlap))).step_time

    def _speed_N(self, speeds: Mapping[str, float]) -> NDArray[np.float64]:
        return np.array([speeds[device.name] for device in self.devices])

    def _overlap(self, now_s: float, links: Mapping[str, Link], noise: float) -> Overlap:
        given = self._cluster.scenario.overlap
        if given.t_o is not None and given.t_u is not None:
            return Overlap(gamma=given.gamma, t_o=given.t_o * noise, t_u=given.t_u * noise)
        mbit_s = given.mbit_s
        if len(self.islands) > 1:
            mbit_s = min(links[name].at_mbit_s(now_s) for name in self.islands)
        seconds, last = ring_overlap(self._cluster.entries, given.bucket_mib * 2**20, len(self.devices), mbit_s)
        return Overlap(gamma=given.gamma, t_o=noise * seconds * (1 - last), t_u=noise * seconds * last)
