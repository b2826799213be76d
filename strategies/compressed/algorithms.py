"""Choose a run's compressor from its settings."""

from __future__ import annotations

import math
from typing import Final

from atoll.strategies.compressed.codes.compressors import Compressor
from atoll.strategies.compressed.codes.dense_codes import BlockIntegers, Float16, Signs
from atoll.strategies.compressed.codes.low_rank import LowRank
from atoll.strategies.compressed.codes.sparse_codes import Above, Largest, RandomK
from atoll.strategies.compressed.settings import Compressed

WARMUP_DENSITY: Final = 0.25


def compressor_of(settings: Compressed, seed: int) -> Compressor:
    """Return the run's compressor. seed: the run's, equal on all ranks."""
    match settings.algorithm:
        case "float16":
            return Float16()
        case "int8":
            return BlockIntegers(8)
        case "int4":
            return BlockIntegers(4)
        case "random-k":
            return RandomK(seed)
        case "dgc":
            return Largest()
        case "ef-sign":
            return Signs(two_sided=False)
        case "one-bit":
            return Signs(two_sided=True)
        case "threshold":
            return Above(settings.threshold)
        case "power":
            return LowRank(settings.rank, seed)


def momentum_of(settings: Compressed) -> float:
    """Return the factor of the momentum that each rank adds up by itself; 0: none."""
    return settings.momentum if settings.algorithm == "dgc" else 0.0


def clip_norm_of(settings: Compressed, workers: int) -> float | None:
    """Return the largest norm of a worker's part of a tensor: norms of n equal parts add up to sqrt(n) times one (Deep
    Gradient Compression, Section 3.2). None: gradients are not clipped."""
    clips = settings.algorithm == "dgc" and settings.clip_norm > 0
    return settings.clip_norm / math.sqrt(workers) if clips else None


def density_at(settings: Compressed, step: int) -> float:
    """Return the density of a step. For `dgc` it falls exponentially during the warm-up."""
    if settings.algorithm == "dgc" and step < settings.warmup_steps and settings.density < WARMUP_DENSITY:
        return float(WARMUP_DENSITY * (settings.density / WARMUP_DENSITY) ** (step / settings.warmup_steps))
    return settings.density
