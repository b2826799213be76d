"""Counts what sending less, or later, costs in learning, as the race measured it (docs/performance.md, "What a link
bears" and "Late updates and turns"). Of one small model: rather too little for what a plan costs than too much.
Pure."""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import Final

from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import LocalSteps

MEASURED: Final = ((0.2, 1.0), (0.146, 1.0), (0.045, 1.29), (0.014, 1.71))
"""Of a density, steps to the target for one at 0.2: medians of three seeds."""
LATE: Final = 0.05
"""Of a step, that each step costs by which others' updates come later than one."""
TOLD_FROM: Final = 1.05


def steps_for_one(pace: LocalSteps) -> float:
    """Its steps that teach what one does by the defaults; at least 1. Turns count as what they send in a step."""
    return _of_density(pace.density / pace.every) * (1 + LATE * max(0, pace.staleness - 1))


def told(pace: LocalSteps) -> list[str]:
    """'learning takes about 1.7 times the steps'; nothing where it is next to nothing."""
    steps = steps_for_one(pace)
    return [f"learning takes about {steps:.2g} times the steps"] if steps >= TOLD_FROM else []


def steps_of_plan(settings: LocalSteps, planned: LocalStepsPlan | None) -> float:
    """As `steps_for_one`, of a job's newest plan."""
    return steps_for_one(settings if planned is None else planned.over_settings(settings))


def _of_density(density: float) -> float:
    """Between what was measured, and below it, a straight line over the density's logarithm."""
    if density >= MEASURED[0][0]:
        return 1.0
    (above, more), (below, most) = next(
        (pair for pair in pairwise(MEASURED) if density >= pair[1][0]), (MEASURED[-2], MEASURED[-1])
    )
    return more + (most - more) * log(above / density) / log(above / below)
