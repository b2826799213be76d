"""The compressor of a run, as its settings say."""

from __future__ import annotations

from typing import Final

from atoll.strategies.compressed.codes.compressors import Compressor
from atoll.strategies.compressed.codes.dense_codes import BlockIntegers, Float16, Signs
from atoll.strategies.compressed.codes.low_rank import LowRank
from atoll.strategies.compressed.codes.sparse_codes import Above, Largest, RandomK, WithMomentum
from atoll.strategies.compressed.settings import Compressed

WARMUP_DENSITY: Final = 0.25


def compressor_of(settings: Compressed, entries: int, seed: int) -> Compressor:
    """entries: of the model. seed: the run's, equal on all ranks."""
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
            return WithMomentum(settings.momentum, entries) if settings.momentum else Largest()
        case "ef-sign":
            return Signs(two_sided=False)
        case "one-bit":
            return Signs(two_sided=True)
        case "threshold":
            return Above(settings.threshold)
        case "power":
            return LowRank(settings.rank, seed)


def density_at(settings: Compressed, step: int) -> float:
    """Of `dgc` it falls exponentially while it warms up."""
    if settings.algorithm == "dgc" and step < settings.warmup_steps and settings.density < WARMUP_DENSITY:
        return float(WARMUP_DENSITY * (settings.density / WARMUP_DENSITY) ** (step / settings.warmup_steps))
    return settings.density
