"""StrategySettings of strategy `volunteer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from atoll.strategies.declaration import StrategySettings


class Volunteer(StrategySettings):
    """The exact gradient of the whole batch, in parts that volunteers compute too."""

    stages: Annotated[int, Field(ge=1, le=256)] = 1
    """parts that the model is cut into: so many workers are a pipeline and hold it together, and the job's workers are
    a multiple of it; a volunteer helps one of them, and needs its part of the model alone"""

    thin_links: Literal["float32", "bfloat16", "int8"] = "float32"
    """the coarsest form in which weights, activations and gradients travel to and from volunteers whose link takes more
    than 30 % of their time; on others they are float32, and with `float32` every gradient is exact. Who adds less than
    70 % of its power even so waits"""

    @property
    def stages_of_model(self) -> int:
        return self.stages

    @property
    def makes_rounds(self) -> bool:
        return False
