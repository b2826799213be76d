"""StrategySettings of strategy `local-steps`."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from atoll.strategies.declaration import Flag, StrategySettings

SentShare: TypeAlias = Annotated[float, Field(ge=0.0001, le=1)]
Every: TypeAlias = Annotated[int, Field(ge=1, le=1000)]
Staleness: TypeAlias = Annotated[int, Field(ge=0, le=15)]
Gradients: TypeAlias = Literal["own", "shared_params"]

RETURNED: Final = 2.0
"""Blocks that an aggregator returns for each block that an island sends: islands send different ones
(docs/performance.md)."""


class LocalSteps(StrategySettings):
    """Each island trains on at once by its own optimizer; what it is ahead of the shared parameters goes in few bits to
    aggregators, who send back what the shared parameters lack. Raises SettingError when made."""

    density: Annotated[SentShare, Flag("SHARE", "of its entries that an island sends of what is due, e.g. 0.2")] = 0.2
    """share of its entries that an island sends of what is due, 0.0001 to 1; aggregators send back twice as much at
    most; `atoll adjust JOB --density D` changes it on the run, on all workers from the same step"""

    every: Annotated[Every, Flag("STEPS", "between two exchanges of one entry, e.g. 10")] = 1
    """steps between two exchanges of one entry; in each step an equal part of the model is due"""

    values: Literal["int2", "int4", "int8", "float16", "bfloat16", "float32"] = "int2"
    """rounding of values on the wire: `int8` and `int4` with a scale for each 16, `int2` is a sign and one of
    two magnitudes; what rounding takes away stays in the residual"""

    staleness: Staleness = 1
    """steps that others' updates may be late, 0 to 15"""

    gradients: Gradients = "own"
    """weights that gradients are taken at: an island's `own`, which are ahead, or the `shared_params`, which learns
    more where islands have nothing in common, as classes that no other one has; the controller sees that"""

    digest_every: Annotated[int, Field(ge=1, lt=2**32)] = 100
    """steps between comparisons of all workers' weights"""
