"""The ranks of one simulated run: how long their steps really take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.controller.simulator.cluster import Cluster
from atoll.controller.simulator.devices import Computing, SimulatedDevice, SimulatedDevices
from atoll.controller.simulator.policies import Choice
from atoll.controller.simulator.strategy_steps import Network, StrategySteps, Timed
from atoll.strategies import registry
from atoll.strategies.declaration import load


class Ranks:
    """Whoever is there from `begins_s` on. islands: their names, sorted; leaders: the rank that sends for each.

    Speeds and network may change; they are given at each step.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[SimulatedDevice], begins_s: float) -> None:
        self.devices = tuple(devices)
        self.bounds = tuple(device.bounds for device in devices)
        self.island_of = tuple(device.island for device in devices)
        self.islands = sorted(set(self.island_of))
        self.leaders = [self.island_of.index(name) for name in self.islands]
        self._costs = SimulatedDevices(devices)
        steps = load(registry.find(cluster.scenario.strategy).simulator)
        self._steps: StrategySteps = steps(cluster, self.island_of, begins_s)

    def step(
        self,
        choice: Choice,
        speeds: Mapping[str, float],
        network: Network,
        *,
        times_rng: np.random.Generator,
        network_rng: np.random.Generator,
    ) -> tuple[Computing, Timed]:
        """The next step, with noise."""
        computing = self._costs.drawn(choice.batches, self._speed_N(speeds), times_rng)
        return computing, self._steps.step(computing, choice.params, network, network_rng)

    def exact_s(self, choice: Choice, speeds: Mapping[str, float], network: Network) -> float:
        """Seconds of a step without noise, if speeds and network stay as they are."""
        return self._steps.exact_s(self._costs.exact(choice.batches, self._speed_N(speeds)), choice.params, network)

    def optimum_s(self, total: int, speeds: Mapping[str, float], network: Network) -> float:
        """Seconds of the best split's step without noise. 0 where it is not known, as of devices that saturate."""
        if any(device.cost.floor for device in self.devices):
            return 0.0
        return self._steps.optimum_s(total, [d.model(speeds[d.name]) for d in self.devices], network)

    def extra(self, choice: Choice) -> float | None:
        """As StrategySteps.extra."""
        return self._steps.extra(sum(choice.batches), choice.params)

    def _speed_N(self, speeds: Mapping[str, float]) -> NDArray[np.float64]:
        return np.array([speeds[device.name] for device in self.devices])
