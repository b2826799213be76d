"""What benchmarks/wan.py can be asked for."""

from __future__ import annotations

import pytest
from lab.options import METHODS, Method, Rate, split_methods
from lab.sets import SETS, TARGETS

from atoll.errors import BadInput
from atoll.strategies.stale_sparse.settings import StaleSparse


def test_commas_within_a_method_belong_to_its_options() -> None:
    found = split_methods("local,stale-sparse:sparsity=0.95,staleness=0,ddp-powersgd:rank=4,stale-sparse,ddp")
    assert [(method.name, dict(method.options)) for method in found] == [
        ("local", {}),
        ("stale-sparse", {"sparsity": 0.95, "staleness": 0}),
        ("ddp-powersgd", {"rank": 4}),
        ("stale-sparse", {}),
        ("ddp", {}),
    ]
    assert found[1].text == "stale-sparse:sparsity=0.95,staleness=0"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("horovod", "there is no method 'horovod'; choose among local, ddp"),
        ("ddp:rank=2", "method ddp has no option 'rank'; it takes: none"),
        ("stale-sparse:rate=0.9", "has no option 'rate'; it takes: sparsity, staleness"),
        ("ddp-powersgd:rank=two", "rank = 'two' is not a whole number"),
        ("stale-sparse:error_feedback=0", "error_feedback = '0' is not true or false"),
        ("", "there is no method ''"),
    ],
)
def test_a_method_that_does_not_exist_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Method.parse(text)


def test_every_setting_of_the_strategy_can_be_chosen_and_no_other() -> None:
    assert set(METHODS["stale-sparse"]) == set(StaleSparse.model_fields)


def test_rates_are_fixed_or_a_trace_or_none() -> None:
    assert [(Rate.parse(text).mbit_s, Rate.parse(text).traced) for text in ("100", "2.5", "trace", "none")] == [
        (100.0, False),
        (2.5, False),
        (None, True),
        (None, False),
    ]
    assert [Rate.parse(text).unshaped for text in ("100", "trace", "none")] == [False, False, True]


@pytest.mark.parametrize("text", ["", "fast", "0", "-5", "nan", "inf", "1e9"])
def test_a_rate_that_no_link_can_have_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is neither none, trace nor Mbit/s"):
        Rate.parse(text)


@pytest.mark.parametrize("name", SETS)
def test_every_ready_made_set_asks_for_things_that_exist(name: str) -> None:
    experiment = SETS[name]
    for method in split_methods(experiment.methods):
        if method.name == "stale-sparse":
            StaleSparse(**dict(method.options))  # type: ignore[arg-type]
    assert all(Rate.parse(text) for text in experiment.rates.split(","))
    assert set(experiment.models) <= set(TARGETS)
