"""Rounds of pipelines in virtual time, by the real ledger, scheduler, rules and order of passes."""

from __future__ import annotations

from functools import cache

import pytest
from grouping.virtual import Pace, Trial
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.strategies.groups.settings import Groups

RULES = ("all", "pairs", "static", "scheduled")


@cache
def rounds_per_s(rule: str, stages: int, slower: float) -> float:
    paces = [Pace((1.0,) * stages) for _ in range(3)] + [Pace((slower,) * stages)]
    trial = Trial(Groups.model_validate({"stages": stages, "grouping": rule}), paces, 8, 48)
    trial.train(9)
    return trial.rounds_per_s


def test_one_slower_pipeline_costs_nearly_nothing_but_its_own_work() -> None:
    """Of four, three times slower: the rate is within 8 % of that of all four at work all the time; an all-reduce in
    each iteration has less than 40 % of it. Where all are alike, no rule is slower than that."""
    at_work = (3 + 1 / 3) / (8 * 3 * 48)
    assert 0.92 < rounds_per_s("scheduled", 2, 3.0) / at_work <= 1.0
    assert rounds_per_s("scheduled", 2, 3.0) > 2.5 * rounds_per_s("all", 2, 3.0)
    for rule in RULES:
        assert rounds_per_s(rule, 2, 1.0) >= rounds_per_s("all", 2, 1.0)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30)
@given(
    stages=st.integers(1, 3),
    paces=st.lists(st.lists(st.integers(1, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    micros=st.integers(1, 5),
    batches=st.integers(1, 25),
)
def test_nobody_waits_for_ever_whatever_passes_take(
    rule: str, stages: int, paces: list[list[int]], micros: int, batches: int
) -> None:
    """Also where stages of a pipeline are unlike each other, and groups of one stage are others than those of the next:
    every round ends for all, with each batch trained once. (Story: sums of times that no binary fraction is made equal
    pipelines leave a round's last batches to each other.)"""
    trial = Trial(
        Groups.model_validate({"stages": stages, "grouping": rule}),
        [Pace(tuple(0.018 * each for each in one[:stages])) for one in paces],
        micros,
        batches,
    )
    trial.train(3)
    assert trial.trained == [(1 << batches) - 1] * 3
