"""Measures how close `atoll profile` comes to a known g(r, X) with 30 probes, and what its two choices are worth.

    python benchmarks/convergence_profile.py [--seeds 10] [--probes 30]

No training: the losses are made up, with noise, from a function shaped like the one that examples/mnist_cnn.py showed.
Sparsities uniform from 0 to 0.999 (StellaTrain, Algorithm 1) against uniform in the logarithm of 1 - r; batches by
expected improvement against any. The error is that of 1 + g over the grid, at sparsities below 0.9 and from there on.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import numpy as np
from lab.machine import processor

from atoll.profiling import surrogate
from atoll.profiling.surrogate import Tried

BATCHES = surrogate.candidate_batches(64, 1024)
NOISE = 0.02  # of the logarithm of a loss
METHODS = (("uniform", True), ("log-uniform", True), ("log-uniform", False))


def truth(sparsity: float, batch: float) -> float:
    """Flat up to 0.9, then a slope in the logarithm of what is kept, and flat again where hardly anything is."""
    rise = 1 / (1 + math.exp(-2.5 * (-math.log10(1 - sparsity) - 2)))
    return 1.04 + 0.32 * rise * math.pow(256 / batch, 0.3)


def probe(sampling: str, expected_improvement: bool, probes: int, seed: int) -> list[Tried]:
    generator = np.random.default_rng(1000 + seed)
    tried: list[Tried] = []
    for number in range(probes):
        sparsity = surrogate.draw_sparsity(number, sampling, seed)
        if expected_improvement:
            batch = surrogate.choose_batch(sparsity, tried, BATCHES, seed)
        else:
            batch = int(generator.choice(np.array(BATCHES)))
        tried.append(Tried(sparsity, batch, truth(sparsity, batch) * math.exp(NOISE * generator.standard_normal())))
    return tried


def errors(tried: list[Tried], sampling: str, seed: int) -> tuple[float, float]:
    """Root mean square of the relative error of 1 + g, at sparsities below 0.9, and from 0.9 to 0.9999.

    Beyond the largest sparsity that was tried the surrogate's edge holds, as for the planner."""
    fitted = surrogate.fit(tried, dict.fromkeys(BATCHES, 1.0), BATCHES, sampling=sampling, seed=seed).surrogate
    below: list[float] = []
    above: list[float] = []
    for sparsity in surrogate.grid_sparsities(surrogate.MOST_SPARSITY["log-uniform"]):
        row = min(sum(one < sparsity for one in fitted.sparsities), len(fitted.sparsities) - 1)
        for column, batch in enumerate(BATCHES):
            off = math.log1p(fitted.extra[row][column]) - math.log(truth(sparsity, batch))
            (below if sparsity < 0.9 else above).append(off * off)
    return math.sqrt(statistics.fmean(below)), math.sqrt(statistics.fmean(above))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--probes", type=int, default=30)
    options = parser.parse_args()
    print(f"{processor()}; {options.probes} probes, noise {NOISE:.0%}, {options.seeds} seeds; median [min-max]")
    for sampling, expected_improvement in METHODS:
        began_s = time.perf_counter()
        found = [
            errors(probe(sampling, expected_improvement, options.probes, seed), sampling, seed)
            for seed in range(options.seeds)
        ]
        took_s = (time.perf_counter() - began_s) / options.seeds
        columns = [f"{statistics.median(one):.1%} [{min(one):.1%}-{max(one):.1%}]" for one in zip(*found, strict=True)]
        how = "expected improvement" if expected_improvement else "any batch"
        print(f"{sampling:12} {how:21} error below 0.9: {columns[0]}  from 0.9: {columns[1]}  {took_s:.1f} s a profile")


if __name__ == "__main__":
    main()
