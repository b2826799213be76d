"""The time that devices really take for a step: the truth that estimators see through noise.

Legend of suffixes: N = ranks, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from atoll.controller.planners.batches.bounds import Bounds
from atoll.controller.planners.batches.optperf import NodeModel
from atoll.controller.planners.batches.water_filling import F64

FORWARD_SHARE: Final = 1 / 3
"""Of a step's computing, where only the whole is known: a backward pass takes two forward passes' time."""


@dataclass(frozen=True, slots=True)
class Cost:
    """With a batch of x: load, forward and update q max(x, floor) + s seconds, backward k max(x, floor) + m."""

    q: float
    s: float
    k: float
    m: float
    floor: float = 0.0

    @classmethod
    def saturating(cls, alpha: float, beta: float) -> Cost:
        """StellaTrain (2024), Eq. 2: min(beta / alpha x, beta) samples a second."""
        return cls(FORWARD_SHARE / beta, 0.0, (1 - FORWARD_SHARE) / beta, 0.0, alpha)


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """noise: sigma of the log-normal factor on each part of a step; its mean is 1. spikes: probability that a step
    takes spike_factor times as long. speed: 1.0 = as `cost` says. dense_s: what exchanging every entry would take of a
    step, beside `cost`. It is there in joins_s <= time < leaves_s."""

    name: str
    island: str
    cost: Cost
    bounds: Bounds
    noise: float
    spikes: float
    spike_factor: float
    speed: float
    dense_s: float
    joins_s: float
    leaves_s: float

    def model(self, speed: float) -> NodeModel:
        """As a planner sees it above `floor`."""
        cost = self.cost
        return NodeModel(
            q=cost.q / speed,
            s=cost.s / speed,
            k=cost.k / speed,
            m=cost.m / speed,
            min_batch=self.bounds.min_batch,
            max_batch=self.bounds.max_batch,
        )


@dataclass(frozen=True, slots=True)
class Computing:
    """Seconds of one step. before_N: load, forward and update. backward_N: the backward pass. dense_N: what exchanging
    every entry would take beside them."""

    before_N: F64
    backward_N: F64
    dense_N: F64 = field(default_factory=lambda: np.zeros(1))

    @property
    def all_N(self) -> F64:
        return self.before_N + self.backward_N


class SimulatedDevices:
    """Those of one run, by rank."""

    def __init__(self, devices: Sequence[SimulatedDevice]) -> None:
        self.members = tuple(devices)
        self._q, self._s, self._k, self._m, self._floor = np.array(
            [(d.cost.q, d.cost.s, d.cost.k, d.cost.m, d.cost.floor) for d in devices], dtype=np.float64
        ).T
        self._dense_N = np.array([d.dense_s for d in devices])
        self._sigma_N = np.array([d.noise for d in devices])
        self._spikes_N = np.array([d.spikes for d in devices])
        self._spike_factor_N = np.array([d.spike_factor for d in devices])

    def exact(self, batches: Sequence[int], speed_N: F64) -> Computing:
        """Without noise."""
        batch = np.maximum(np.array(batches, dtype=np.float64), self._floor)
        before_N, backward_N = self._q * batch + self._s, self._k * batch + self._m
        return Computing(before_N / speed_N, backward_N / speed_N, self._dense_N / speed_N)

    def drawn(self, batches: Sequence[int], speed_N: F64, rng: np.random.Generator) -> Computing:
        """With this step's noise. Draws the same number of values whatever the batches are."""
        exact = self.exact(batches, speed_N)
        normal_2N = rng.standard_normal((2, len(self.members)))
        noise_2N = np.exp(self._sigma_N * normal_2N - self._sigma_N**2 / 2)
        spike_N = np.where(rng.random(len(self.members)) < self._spikes_N, self._spike_factor_N, 1.0)
        return Computing(
            exact.before_N * noise_2N[0] * spike_N,
            exact.backward_N * noise_2N[1] * spike_N,
            exact.dense_N * noise_2N[0],
        )
