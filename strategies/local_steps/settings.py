"""Settings of strategy `local-steps`."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from atoll.strategies.declaration import StrategySettings

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

    density: SentShare = 0.2
    """Let each island send this share of the entries that are due, 0.0001 to 1. Aggregators return at most twice as
    much."""

    every: Every = 1
    """Exchange each entry every N steps. In each step an equal part of the model is due."""

    values: Literal["int2", "int4", "int8", "float16", "bfloat16", "float32"] = "int2"
    """Round values on the wire to this type. `int8` and `int4` have a scale for each 16 values. `int2` is a sign and
    one of two magnitudes. What rounding takes away stays in the residual."""

    staleness: Staleness = 1
    """Allow the updates of other islands to be at most N steps late, 0 to 15."""

    gradients: Gradients = "own"
    """Take gradients at an island's `own` weights, which are ahead, or at the `shared_params`. The latter learns more
    where islands have nothing in common, for example where each has classes of its own; the controller detects that."""

    digest_every: Annotated[int, Field(ge=1, lt=2**32)] = 100
    """Compare the weights of all workers every N steps."""
