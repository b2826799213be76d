"""Settings of strategy `volunteer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from atoll.strategies.declaration import StrategySettings


class Volunteer(StrategySettings):
    """The exact gradient of the whole batch, in parts that volunteers compute too."""

    stages: Annotated[int, Field(ge=1, le=256)] = 1
    """Cut the model into N parts. N workers form a pipeline, and the job's workers are a multiple of N. A
    volunteer helps one worker and needs only the part of that worker."""

    thin_links: Literal["float32", "bfloat16", "int8"] = "float32"
    """Send weights, activations and gradients in this form, at the coarsest, to and from volunteers whose link takes
    more than 30 % of their time. Other links carry float32, and with `float32` every gradient is exact. A volunteer
    that adds less than 70 % of its power even so waits."""

    @property
    def stages_of_model(self) -> int:
        return self.stages

    @property
    def makes_rounds(self) -> bool:
        return False
