"""Settings of strategy `compressed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from atoll.strategies.compressed.codes.algorithm import Algorithm
from atoll.strategies.declaration import StrategySettings


class Compressed(StrategySettings):
    """Every step sums gradients that were compressed; what compression left out counts in the next step.

    Source: Espresso and Cupcake (Wang, 2023) for what is compressed, where, and what is fused."""

    algorithm: Algorithm = "float16"
    """Compress gradients by this code. `float16` halves them. `int8` and `int4` keep 8 and 4 bits of each entry, with a
    scale for 16 entries. `dgc` sends the largest entries, `random-k` random ones, `threshold` those beyond a magnitude.
    `ef-sign` sends a bit of each entry and a mean for 1,024 of them, `one-bit` a bit and two means. `power` sends a
    product of two thin matrices."""

    density: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Send this share of the entries, with `dgc` and `random-k`."""

    threshold: Annotated[float, Field(ge=0)] = 0.001
    """Send the entries of a worker's gradient that exceed this magnitude, with `threshold`."""

    rank: Annotated[int, Field(ge=1, le=64)] = 4
    """Use matrices of N columns, with `power`."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Let each worker add up this momentum of all its gradients before it chooses the largest, with `dgc`. Take the
    momentum off the optimizer then."""

    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Clip each worker's part of a tensor's gradient to this norm of the whole gradient, with `dgc`; 0: never."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Lower the density from 0.25 to `density` within the first N steps, with `dgc`."""

    min_bytes: Annotated[int, Field(ge=0)] = 65_536
    """Compress gradients of at least N bytes until a plan says which tensors to compress."""


WORDS: Final[Mapping[Algorithm, str]] = {
    "float16": "float16",
    "int8": "int8",
    "int4": "int4",
    "random-k": "random-k",
    "dgc": "DGC",
    "ef-sign": "EF-sign",
    "one-bit": "1-bit",
    "threshold": "threshold",
    "power": "low rank",
}
"""Names of the algorithms in sentences."""
