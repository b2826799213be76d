"""Simulated devices: the time that a step really takes, which estimators see through noise.

Legend of suffixes: N = ranks, in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from atoll.controller.planners.batches.optperf import NodeModel
from atoll.controller.planners.batches.water_filling import F64, Bounds
from atoll.controller.simulator.scenario import DeviceSection

FORWARD_SHARE: Final = 1 / 3
"""Share of a step's computing before its backward pass, where only the whole is known."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a batch x: load, forward and update q max(x, floor) + s, backward k max(x, floor) + m."""

    q: float
    s: float
    k: float
    m: float
    floor: float = 0.0

    @classmethod
    def saturating(cls, alpha: float, beta: float) -> Cost:
        """Return the cost of min(beta / alpha x, beta) samples a second. Source: StellaTrain (2024), Eq. 2."""
        return cls(FORWARD_SHARE / beta, 0.0, (1 - FORWARD_SHARE) / beta, 0.0, alpha)


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A device of the scenario; `given` is the section that it comes from, perhaps with others."""

    name: str
    cost: Cost
    given: DeviceSection

    @property
    def bounds(self) -> Bounds:
        """Limits of its batch. The lower one is 1: an idle rank would never be measured again."""
        return Bounds(min_batch=1, max_batch=self.given.max_batch)

    def is_called(self, name: str) -> bool:
        """Tell whether this is the device's name, or that of its section."""
        return self.name == name or (self.name.startswith(f"{name}-") and self.name[len(name) + 1 :].isdigit())

    def is_there(self, now_s: float) -> bool:
        leaves_s = math.inf if self.given.leaves_s is None else self.given.leaves_s
        return self.given.joins_s <= now_s < leaves_s

    def model(self, speed: float) -> NodeModel:
        """Return the planners' model of it, which holds above `cost.floor`."""
        cost = self.cost
        return NodeModel(
            q=cost.q / speed, s=cost.s / speed, k=cost.k / speed, m=cost.m / speed, **dict(self.bounds)
        )  # fmt: skip


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
