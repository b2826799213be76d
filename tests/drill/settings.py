"""The settings of a drill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a drill starts and strikes."""

    length_s: float
    every_s: float
    seed: int
    machines: int
    workers: int
    """Fixed: as few as many. Fewer than machines: the others stand by."""

    controllers: int
    kinds: tuple[str, ...]
    strategy: Literal["dense", "stale-sparse"] = "dense"
    step_s: float = 0.1
