"""What sending less, or later, costs in learning."""

from __future__ import annotations

import pytest

from atoll.controller.planners.islands.exchange_density import STEPS_BY_DENSITY
from atoll.strategies import registry
from atoll.strategies.declaration import load
from atoll.strategies.local_steps.controller import steps_for_one, steps_of_plan, told
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import LocalSteps


@pytest.mark.parametrize(("density", "steps"), [*STEPS_BY_DENSITY, (1.0, 1.0), (0.9, 1.0)])
def test_what_was_measured_is_said(density: float, steps: float) -> None:
    assert steps_for_one(LocalSteps(density=density)) == pytest.approx(steps)


def test_less_and_later_never_takes_fewer_steps_and_turns_count_as_what_they_send() -> None:
    taken = [steps_for_one(LocalSteps(density=10**-exponent)) for exponent in (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4)]
    assert taken == sorted(taken)
    assert 3 < taken[-1] < 5
    assert steps_for_one(LocalSteps(density=0.16, every=8)) == steps_for_one(LocalSteps(density=0.02))
    late = [steps_for_one(LocalSteps(staleness=steps)) for steps in (0, 1, 2, 6)]
    assert late == pytest.approx([1.0, 1.0, 1.05, 1.25])


def test_it_is_told_where_it_is_more_than_next_to_nothing() -> None:
    assert told(LocalSteps()) == told(LocalSteps(density=0.14)) == []
    assert told(LocalSteps(density=0.014)) == ["learning takes about 1.7 times the steps"]


def test_a_plan_counts_over_the_jobs_settings() -> None:
    of_plan = load(registry.find("local-steps").steps_of_plan)
    assert of_plan is steps_of_plan
    assert of_plan(LocalSteps(), None) == 1
    assert of_plan(LocalSteps(), LocalStepsPlan(density=0.014)) == pytest.approx(1.71)
