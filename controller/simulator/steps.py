"""Steps of a simulated job: the ranks' computing as estimators see it through noise, and the seam to a strategy, which
says how long its steps take and what they are worth.

Legend of suffixes: N = ranks, J = islands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from atoll.controller.planners.batches.optperf import NodeModel
from atoll.controller.planners.batches.water_filling import F64
from atoll.controller.simulator.cluster import Cluster, Link, SimulatedDevice
from atoll.strategies.declaration import Declared

if TYPE_CHECKING:
    from atoll.controller.simulator.policies import SimulatedPolicy

Params = Mapping[str, Any]
"""Parameters of a plan for the strategy, by name."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Seconds of one step. before_N: load, forward and update. backward_N: the backward pass. dense_N: exchanging
    every entry, which comes on top."""

    before_N: F64
    backward_N: F64
    dense_N: F64 = field(default_factory=lambda: np.zeros(1))

    @property
    def all_N(self) -> F64:
        return self.before_N + self.backward_N


class Ranks:
    """The devices of one run, in order of their ranks. Their speeds may change and are given at each step."""

    def __init__(self, devices: Sequence[SimulatedDevice]) -> None:
        self.devices = tuple(devices)
        self.bounds = tuple(device.bounds for device in devices)
        self.island_of = tuple(device.given.island for device in devices)
        self.islands = sorted(set(self.island_of))
        self.leaders = [self.island_of.index(name) for name in self.islands]
        """The rank that sends for each island."""
        self._q, self._s, self._k, self._m, self._floor = np.array(
            [(d.cost.q, d.cost.s, d.cost.k, d.cost.m, d.cost.floor) for d in devices], dtype=np.float64
        ).T
        self._dense_N, self._sigma_N, self._spikes_N, self._spike_factor_N = np.array(
            [(d.given.dense_s, d.given.noise, d.given.spikes, d.given.spike_factor) for d in devices], dtype=np.float64
        ).T

    @property
    def saturates(self) -> bool:
        return bool(self._floor.any())

    def exact(self, batches: Sequence[int], speeds: Mapping[str, float]) -> Computing:
        """Return a step without noise."""
        speed_N = np.array([speeds[device.name] for device in self.devices])
        batch = np.maximum(np.array(batches, dtype=np.float64), self._floor)
        before_N, backward_N = self._q * batch + self._s, self._k * batch + self._m
        return Computing(before_N / speed_N, backward_N / speed_N, self._dense_N / speed_N)

    def drawn(self, batches: Sequence[int], speeds: Mapping[str, float], rng: np.random.Generator) -> Computing:
        """Return a step with noise. It takes as many values from `rng` whatever the batches are."""
        exact = self.exact(batches, speeds)
        normal_2N = rng.standard_normal((2, len(self.devices)))
        noise_2N = np.exp(self._sigma_N * normal_2N - self._sigma_N**2 / 2)
        spike_N = np.where(rng.random(len(self.devices)) < self._spikes_N, self._spike_factor_N, 1.0)
        return Computing(
            exact.before_N * noise_2N[0] * spike_N,
            exact.backward_N * noise_2N[1] * spike_N,
            exact.dense_N * noise_2N[0],
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one step; a number stands for all ranks or islands. ends_s: when its slowest rank is done. step_N: from
    boundary to boundary. sync_N, last_sync_N: of the all-reduces as each rank sees them. sent_J, busy_J: bytes that
    left each island, and seconds they took to leave. exchange_N: device time of the exchange beside computing.
    messages: to the strategy's controller half, by rank."""

    ends_s: float
    step_N: F64
    first_bucket_N: F64 | float = 0.0
    sync_N: F64 | float = 0.0
    last_sync_N: F64 | float = 0.0
    stall_N: F64 | float = 0.0
    sent_J: F64 | float = 0.0
    busy_J: F64 | float = 0.0
    exchange_N: F64 | float = 0.0
    messages: Mapping[int, Declared] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """State of the links at a moment. links: by island."""

    now_s: float
    links: Mapping[str, Link]


class StrategySteps(ABC):
    """Steps of one run of a simulated job. A strategy overrides `step` and `exact_s`."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Tables that a scenario has to have for it, of those in scenario.NEEDS."""

    policies: ClassVar[Mapping[str, SimulatedPolicy]] = {}
    """Baselines of its own, by name."""

    def __init__(self, cluster: Cluster, island_of: Sequence[str], begins_s: float) -> None:
        """island_of: by rank."""
        self._cluster, self._ranks, self._islands = cluster, len(island_of), sorted(set(island_of))

    @abstractmethod
    def step(self, computing: Computing, params: Params, network: Network, rng: np.random.Generator) -> Timed:
        """Return the next step. rng: of the network's noise."""

    @abstractmethod
    def exact_s(self, computing: Computing, params: Params, network: Network) -> float:
        """Return the seconds of a step without noise, if the network stays as it is."""

    def optimum_s(self, total: int, nodes: Sequence[NodeModel], network: Network) -> float:
        """Return the seconds of the best split's step without noise; 0 where it is not known."""
        return 0.0

    def extra(self, total_batch: int, params: Params) -> float | None:
        """Return the share of samples that it needs more; None: the gradients' noise decides, which ranks measure."""
        return None

    def _circle(self) -> int:
        """Return how many take part in a sum: one rank of each island, where there are several."""
        return len(self._islands) if len(self._islands) > 1 else self._ranks

    def _mbit_s(self, network: Network) -> float:
        """Return the rate of the thinnest link, or the one within a single island."""
        if len(self._islands) == 1:
            return float(self._cluster.scenario.overlap.mbit_s)
        return min(network.links[name].at_mbit_s(network.now_s) for name in self._islands)
