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
    """code of a compressed gradient: `float16` halves it; `int8` and `int4` have so many bits for an entry and a scale
    for 16 of them; `dgc` its largest entries, `random-k` some at random, `threshold` those beyond a magnitude;
    `ef-sign` a bit for each and a mean for 1,024 of them, `one-bit` two means; `power` a product of two thin
    matrices"""

    density: Annotated[float, Field(gt=0, le=1)] = 0.01
    """share of the entries that `dgc` and `random-k` send"""

    threshold: Annotated[float, Field(ge=0)] = 0.001
    """magnitude beyond which `threshold` sends an entry of a worker's part of the gradient"""

    rank: Annotated[int, Field(ge=1, le=64)] = 4
    """columns of the matrices of `power`"""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """momentum of `dgc`: each worker's own, of all gradients, added up before the largest are chosen; take it off the
    optimizer then"""

    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """of `dgc`: the norm of the whole gradient of a tensor to which each worker clips its part; 0: none"""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """of `dgc`: so many steps long the density falls from 0.25 to `density`"""

    min_bytes: Annotated[int, Field(ge=0)] = 65_536
    """until a plan says which: gradients of so many bytes are compressed, smaller ones are not"""


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
"""For people."""
