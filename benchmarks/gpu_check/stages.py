"""The stages of the check, in the order in which they run. A new stage is a module and a line here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Stage:
    number: int
    title: str
    limit_s: float
    """A stage that takes longer is ended and counts as failed."""
    module: str
    """Its `run(device, rows)` does the work, in a process of its own."""
    by_name: bool = False
    """It is run only where --stages names it: it takes most of a call's time."""


STAGES: Final = (
    Stage(0, "machine", 40.0, "gpu_check.machine"),
    Stage(2, "kernels", 60.0, "gpu_check.kernels"),
    Stage(6, "conformance", 90.0, "gpu_check.conformance"),
    Stage(4, "training steps", 180.0, "gpu_check.training_steps"),
    Stage(3, "process groups", 45.0, "gpu_check.process_groups"),
    Stage(5, "checkpoints", 90.0, "gpu_check.checkpointing"),
    Stage(1, "GPU tests", 80.0, "gpu_check.device_tests"),
    Stage(7, "shared device", 100.0, "gpu_check.shared_device"),
    Stage(8, "changing workers", 110.0, "gpu_check.changing_workers"),
    Stage(9, "race", 500.0, "gpu_check.race", by_name=True),
)
"""The cheap stages with the most to say come first: one that is ended late takes no time from them."""
