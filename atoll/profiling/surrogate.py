"""Model of g(r, X): the next probe, and a fit of all probes. Mathematics only.

Source: StellaTrain (Lim et al., 2024), section 4.3 and Algorithm 1: a random sparsity, then the batch with the largest
expected improvement for that sparsity, by a Gaussian process. Deliberate differences:
- Against the baseline of the same batch, which shares its samples and initial weights, so most noise is in both. What
  the batch alone costs is known from the baselines and multiplied back.
- On the logarithm of the losses' ratio: no surrogate below -1, and a trial that diverged is a large number, not inf.
- Over the logarithms of the density, 1 - r, and of the batch; sparsities are drawn there too ("log-uniform"), as 0.9 to
  0.9999 is where thin links work. Uniform in r would put nine of ten trials below 0.9.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate

F64 = NDArray[np.float64]

MOST_SPARSITY: Final = {"log-uniform": 0.9999, "uniform": 0.999}
MAX_RATIO: Final = 10.0
"""Largest ratio of a loss to its baseline; a trial that diverged counts as this."""
_RANDOM_PROBES: Final = 4
"""Probes before the first choice by the model."""
_MIN_IMPROVEMENT: Final = 0.01
"""Improvement of the logarithm of a ratio that counts as none."""
_GRID_STEPS_PER_DECADE: Final = 3
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of a probe. ratio: loss over that of the baseline at the same batch; inf or NaN where it diverged."""

    sparsity: float
    batch: int
    ratio: float


class Fitted(NamedTuple):
    """Fit of all probes, by sparsity and batch. surrogate: relative extra loss against the reference batch's baseline.
    compression: against the same batch's. error: standard error of the surrogate, relative to 1 + extra."""

    surrogate: Surrogate
    compression: Surrogate
    error: tuple[tuple[float, ...], ...]


def candidate_batches(low: int, high: int, count: int = 7) -> tuple[int, ...]:
    """Return at most `count` total batches from low to high, evenly in the logarithm: few, to share baselines."""
    spread = np.exp(np.linspace(math.log(low), math.log(high), count))
    return tuple(sorted({low, high, *(round(float(one)) for one in spread)}))


def draw_sparsity(number: int, sampling: str, seed: int) -> float:
    """Return the sparsity of probe `number`, from 0. Steps of the golden ratio from a random start leave no gaps."""
    start = float(np.random.default_rng(seed).random())
    place = (start + number * _GOLDEN) % 1.0
    if sampling == "uniform":
        return round(place * MOST_SPARSITY[sampling], 6)
    return round(1 - math.pow(1 - MOST_SPARSITY[sampling], place), 6)


def choose_batch(sparsity: float, tried: Sequence[Tried], batches: Sequence[int], seed: int) -> int:
    """Return the total batch with the largest expected improvement of the loss's ratio at this sparsity."""
    if len(tried) < _RANDOM_PROBES or len(batches) == 1:
        return int(np.random.default_rng([seed, len(tried)]).choice(np.array(batches)))
    from skopt.acquisition import gaussian_ei

    model = _Process(tried, batches, seed)
    points = model.points([sparsity] * len(batches), batches)
    # No probe had exactly this sparsity: the best value there is the model's.
    best = float(model.mean(points).min())
    gain = gaussian_ei(points, model.regressor, y_opt=best, xi=_MIN_IMPROVEMENT)
    return int(batches[int(np.argmax(gain))])


def fit(
    tried: Sequence[Tried], baselines: Mapping[int, float], batches: Sequence[int], *, sampling: str, seed: int
) -> Fitted:
    """Return the surrogate on a grid. baselines: loss by batch, at least that of the reference batch."""
    sparsities = grid_sparsities(MOST_SPARSITY[sampling])
    model = _Process(tried, batches, seed)
    at = np.array([(sparsity, batch) for sparsity in sparsities for batch in batches])
    mean, deviation = model.regressor.predict(model.points(at[:, 0], at[:, 1]), return_std=True)
    shape = (len(sparsities), len(batches))
    most = math.log(MAX_RATIO)
    ratio = np.exp(np.clip(mean, -most, most)).reshape(shape)
    known = sorted(baselines)
    losses = [log_ratio(baselines[batch] / baselines[reference_batch(batches)]) for batch in known]
    by_batch = np.exp(np.interp(np.log(batches), np.log(known), losses))

    def grid(extra: F64) -> Surrogate:
        return Surrogate(sparsities=sparsities, batches=tuple(batches), extra=_rounded(extra))

    return Fitted(grid(ratio * by_batch[None, :] - 1), grid(ratio - 1), _rounded(deviation.reshape(shape)))


def _rounded(values: F64) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(f"{value:.5g}") for value in row) for row in values)


def reference_batch(batches: Sequence[int]) -> int:
    """Return the middle one, as in Algorithm 1. Another would scale all predicted times alike and change no plan."""
    return sorted(batches)[len(batches) // 2]


def first_baselines(batches: Sequence[int]) -> tuple[int, ...]:
    """Return the batches whose baselines are always needed; those between can be interpolated."""
    return tuple(dict.fromkeys((reference_batch(batches), min(batches), max(batches))))


def grid_sparsities(most: float) -> tuple[float, ...]:
    """Return sparsities from 0 to `most`, evenly in the logarithm of the density."""
    steps = round(-math.log10(1 - most) * _GRID_STEPS_PER_DECADE)
    return tuple(round(1 - 10 ** (-i / _GRID_STEPS_PER_DECADE), 6) for i in range(steps + 1))


class _Process:
    """Gaussian process over the logarithms of density and batch, each scaled to 0..1."""

    def __init__(self, tried: Sequence[Tried], batches: Sequence[int], seed: int) -> None:
        from skopt.learning import GaussianProcessRegressor
        from skopt.learning.gaussian_process.kernels import ConstantKernel, Matern

        self._low, self._high = math.log(min(batches)), math.log(max(batches))
        kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern([0.5, 0.5], [(0.1, 10.0), (0.1, 10.0)], nu=2.5)
        self.regressor: Any = GaussianProcessRegressor(
            kernel, alpha=1e-8, noise="gaussian", normalize_y=True, n_restarts_optimizer=2, random_state=seed
        )
        points = self.points([one.sparsity for one in tried], [one.batch for one in tried])
        values = np.array([log_ratio(one.ratio) for one in tried])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a length or a noise at its bound, which few trials cannot tell
            self.regressor.fit(points, values)

    def points(self, sparsities: Sequence[float] | F64, batches: Sequence[float] | F64) -> F64:
        kept = -np.log10(1 - np.asarray(sparsities, dtype=np.float64)) / 4
        width = max(self._high - self._low, 1e-9)
        return np.stack([kept, (np.log(np.asarray(batches, dtype=np.float64)) - self._low) / width], axis=1)

    def mean(self, points: F64) -> F64:
        return np.asarray(self.regressor.predict(points), dtype=np.float64)


def log_ratio(ratio: float) -> float:
    """Return the logarithm within MAX_RATIO; NaN has diverged."""
    if math.isnan(ratio):
        return math.log(MAX_RATIO)
    return math.log(min(max(ratio, 1 / MAX_RATIO), MAX_RATIO))
