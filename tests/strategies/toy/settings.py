from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atoll.strategies.declaration import StrategySettings


class Toy(StrategySettings):
    """Gradients as they are, reported with a strength."""

    strength: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Play so hard, 0 to 1."""

    rounds: Annotated[int, Field(ge=1)] = 3
    """Play so many rounds."""
