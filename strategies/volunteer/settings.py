"""StrategySettings of strategy `volunteer`."""

from __future__ import annotations

from typing import Literal

from atoll.strategies.declaration import StrategySettings


class Volunteer(StrategySettings):
    """The exact gradient of the whole batch, in parts that volunteers compute too."""

    thin_links: Literal["float32", "bfloat16", "int8"] = "float32"
    """the coarsest form in which weights and gradients travel to and from volunteers whose link takes more than 30 % of
    their time; on others they are float32, and with `float32` every gradient is exact. Who adds less than 70 % of its
    power even so waits"""

    @property
    def makes_rounds(self) -> bool:
        return False
