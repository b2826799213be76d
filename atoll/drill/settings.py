"""The settings of a drill."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to drill."""

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
    script: Path | None = None
    """The own one where None. It is given --out FOLDER --epochs N and writes with a Recorder."""

    epochs: int | None = None
    """Enough to outlast the drill; computed for the own script."""
