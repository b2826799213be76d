"""Estimate what sending less, or later, costs in learning, as the race measured it (docs/performance.md, "Late updates
and turns"). It measured one small model, so the estimate is rather too low than too high. Pure."""

from __future__ import annotations

from typing import Final

from atoll.controller.planners.islands.exchange_density import steps_for_one_at
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import LocalSteps

LATE: Final = 0.05
"""Share of a step that is lost for each step by which others' updates come later than one."""
TOLD_FROM: Final = 1.05


def steps_for_one(pace: LocalSteps) -> float:
    """Return the steps that teach as much as one step by the defaults; at least 1. Turns count as a step's bytes."""
    return steps_for_one_at(pace.density / pace.every) * (1 + LATE * max(0, pace.staleness - 1))


def told(pace: LocalSteps) -> list[str]:
    """Return 'learning takes about 1.7 times the steps'; nothing below TOLD_FROM."""
    steps = steps_for_one(pace)
    return [f"learning takes about {steps:.2g} times the steps"] if steps >= TOLD_FROM else []


def steps_of_plan(settings: LocalSteps, planned: LocalStepsPlan | None) -> float:
    """Return `steps_for_one` of a job's newest plan."""
    return steps_for_one(settings if planned is None else planned.over_settings(settings))
