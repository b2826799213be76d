"""Reports pipelines of devices that come and go, for people and for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from atoll.controller.planners.schemas import plain
from atoll.controller.simulator.volunteers import VolunteerOutcome

COLUMNS: Final = ("POLICY", "STAGES", "BATCH", "LONGEST", "LOST", "REDONE", "AGAINST FIRST")
NUMBERS: Final = COLUMNS[1:]


def rows(outcomes: Sequence[VolunteerOutcome]) -> list[list[str]]:
    """BATCH: mean; LONGEST: of all batches. LOST: volunteers, in the mean of a batch. REDONE: share of the work that
    was done twice. AGAINST FIRST: how many times as fast as the first policy."""
    first = statistics.fmean(outcomes[0].batch_s)
    return [
        [
            one.policy,
            str(len(one.stages)),
            f"{statistics.fmean(one.batch_s):.1f} s",
            f"{max(one.batch_s):.1f} s",
            f"{one.lost / len(one.batch_s):.1f}",
            f"{100 * one.redone:.1f} %",
            f"{first / statistics.fmean(one.batch_s):.2f}",
        ]
        for one in outcomes
    ]


def document(scenario: str, seed: int, outcomes: Sequence[VolunteerOutcome]) -> dict[str, Any]:
    """Plain data: the same for the same scenario and seed, to the byte."""
    return {"scenario": scenario, "seed": seed, "policies": [plain(one) for one in outcomes]}
