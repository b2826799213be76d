"""Worth of a step in training progress, and the norms of gradients from which it is estimated.

Legend of suffixes: N = ranks, D = dimensions of the simulated gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from atoll.controller.planners.batches.goodput import efficiency
from atoll.controller.planners.batches.water_filling import F64

DIMENSIONS: Final = 64
"""Dimensions of a simulated gradient. Its squared norm varies like those of a large model's layers, and 1,000 ranks
are cheap."""


class SampledNorms(NamedTuple):
    """Squared norms of each rank's mean gradient [N] and of the mean over all samples; zeros where none were sampled.
    halves: as in ObservedStep."""

    local_N: F64
    together: float
    halves: bool = False


class Learning:
    """Progress in samples of the initial batch, from 0 to `target`.

    noise_scales: at 0 and at the target, geometric in between: it grows as a model learns.
    """

    def __init__(self, target: float, initial_batch: int, noise_scales: tuple[float, float]) -> None:
        self.target, self.progress = target, 0.0
        self._initial_batch, self._noise_scales = initial_batch, noise_scales

    @property
    def share(self) -> float:
        return min(1.0, self.progress / self.target)

    @property
    def noise_scale(self) -> float:
        first, last = self._noise_scales
        return float(first * (last / first) ** self.share)

    def step(self, total_batch: int, extra: float | None) -> None:
        """Add one step. extra: g, with which X samples are worth X / (1 + g); None: the noise scale decides."""
        by_noise = efficiency(self.noise_scale, self._initial_batch, total_batch)
        self.progress += total_batch * (by_noise if extra is None else 1 / (1 + extra))

    def norms(self, batches: Sequence[int], rng: np.random.Generator) -> SampledNorms:
        """Return the norms of one step; of a single rank, those of the halves of its batch.

        |G|^2 = 1 and tr(Sigma) = the noise scale, spread evenly over all dimensions."""
        alone = len(batches) == 1
        batch_N = np.array([batches[0] / 2] * 2 if alone else batches, dtype=np.float64)
        deviation_N1 = np.sqrt(self.noise_scale / (DIMENSIONS * batch_N))[:, None]
        local_ND = deviation_N1 * rng.standard_normal((len(batch_N), DIMENSIONS)) + DIMENSIONS**-0.5
        mean_D = (batch_N / batch_N.sum()) @ local_ND
        local_N = np.asarray((local_ND**2).sum(axis=1))
        if alone:
            return SampledNorms(local_N.mean(keepdims=True), float((mean_D**2).sum()), halves=True)
        return SampledNorms(local_N, float((mean_D**2).sum()))
