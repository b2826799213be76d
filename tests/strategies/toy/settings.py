from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atoll.strategies.declaration import Flag, StrategySettings


class Toy(StrategySettings):
    """Gradients as they are, reported with a strength."""

    strength: Annotated[float, Field(ge=0, le=1), Flag("SHARE", "how hard it plays, e.g. 0.5")] = 0.25
    """how hard it plays, 0 to 1"""

    rounds: Annotated[int, Field(ge=1)] = 3
    """of the game"""
