from __future__ import annotations

import pytest

import atoll
from atoll.errors import SettingError
from atoll.strategies import registry
from atoll.strategies.declaration import Shown
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import LocalSteps
from atoll.strategies.local_steps.view import status
from atoll.strategies.local_steps.worker import pace_of


def test_it_is_found_by_name_and_by_settings() -> None:
    assert registry.find("local-steps").settings is LocalSteps is atoll.LocalSteps
    assert registry.of(LocalSteps(density=0.5)).name == "local-steps"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.0}, "density = 0.0"),
        ({"density": 1.5}, "density = 1.5"),
        ({"every": 0}, "every = 0"),
        ({"staleness": 16}, "staleness = 16"),
        ({"values": "int3"}, "values = 'int3'"),
        (
            {"sparsity": 0.9},
            "sparsity = 0.9 is not known. Known: density, every, values, staleness, gradients, digest_every",
        ),
        ({"gradients": "ours"}, "gradients = 'ours' should be 'own' or 'shared_params'. Leave it out for own"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        LocalSteps(**settings)


def test_aggregators_send_back_twice_as_much_and_never_more_than_all() -> None:
    pace = pace_of(LocalSteps(density=0.2))
    assert (pace.sent, pace.returned, pace.at_shared_params) == (0.2, 0.4, False)
    assert pace_of(LocalSteps(density=0.7)).returned == 1.0


def test_a_plan_says_how_much_how_often_and_how_late() -> None:
    planned = LocalStepsPlan(density=0.4, every=4, staleness=3)
    assert pace_of(planned.over_settings(LocalSteps())).sparsity == pytest.approx(0.9)
    said = status(Shown(settings=LocalSteps(), planned=planned, metrics={}))
    assert said == ["40.0 % sent every 4 steps, int2, up to 3 steps late"]


def test_a_plan_says_whose_weights_gradients_are_taken_at() -> None:
    planned = LocalStepsPlan(gradients="shared_params")
    assert pace_of(planned.over_settings(LocalSteps())).at_shared_params
    said = status(Shown(settings=LocalSteps(), planned=planned, metrics={}))
    assert said == ["20.0 % sent, int2, gradients at the shared parameters"]


def test_status_says_how_much_is_sent_and_what_it_costs() -> None:
    settings = LocalSteps(every=10)
    assert status(Shown(settings=settings, planned=None, metrics={})) == ["20.0 % sent every 10 steps, int2"]
    metrics = {"sparsity": 0.95, "stall_share": 0.031}
    said = status(Shown(settings=LocalSteps(density=0.05), planned=None, metrics=metrics))
    assert said == ["5.0 % sent, int2", "stall 3.1 % of the step"]
