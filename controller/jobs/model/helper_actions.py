"""Actions of the controller on a volunteer's device."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.controller.jobs.model.observed import StopRun
from atoll.controller.jobs.model.supply import HelpedRank


@dataclass(frozen=True, slots=True)
class LaunchHelper:
    node: str
    device: int
    job: str
    run: int
    helps: HelpedRank


@dataclass(frozen=True, slots=True)
class MoveHelper:
    """Instruction to stop a helper, so that its device helps `rank`."""

    node: str
    device: int
    stop: StopRun
    rank: int
