"""The mean of what members report, by their parts of the batch."""

from __future__ import annotations

import pytest

from atoll.controller.jobs.agents.reported import KEPT_REPORTS, SILENT_S, Reported

SAMPLES = {0: 30, 1: 10}


def test_numbers_are_weighted_by_samples_of_the_newest_step_that_all_have() -> None:
    """1. Rank 0 has three times the batch, and is a step ahead: what is shown is of the step that both have. 2. A
    number that one alone reports is as it says."""
    seen = Reported()
    seen.observe(0, 4, {"loss": 1.0, "rate": 0.1}, 0.0)
    seen.observe(0, 5, {"loss": 9.0}, 0.1)
    seen.observe(1, 4, {"loss": 2.0}, 0.1)
    assert seen.shown(SAMPLES) == {"loss": pytest.approx(1.25), "rate": pytest.approx(0.1)}
    seen.observe(1, 5, {"loss": 1.0}, 0.2)
    assert seen.shown(SAMPLES) == {"loss": pytest.approx(7.0)}
    assert seen.shown({0: 30}) == {"loss": pytest.approx(5.0)}


def test_a_member_that_says_no_more_is_not_waited_for() -> None:
    seen = Reported()
    assert seen.shown(SAMPLES) == {}
    for rank in SAMPLES:
        seen.observe(rank, 1, {"loss": 3.0}, 0.0)
    seen.observe(0, 90, {"loss": 1.0}, SILENT_S + 0.1)
    assert seen.shown(SAMPLES) == {"loss": 1.0}


def test_two_reports_of_a_step_are_one_and_an_earlier_step_is_none() -> None:
    seen = Reported()
    seen.observe(0, 7, {"loss": 3.0}, 0.0)
    seen.observe(0, 7, {"accuracy": 0.5}, 0.1)
    seen.observe(0, 6, {"loss": 8.0}, 0.2)
    assert seen.shown(SAMPLES) == {"loss": 3.0, "accuracy": 0.5}


def test_who_is_further_behind_than_is_kept_counts_alone() -> None:
    seen = Reported()
    for step in range(KEPT_REPORTS + 5):
        seen.observe(0, step, {"loss": float(step)}, 1.0)
    seen.observe(1, 2, {"loss": 40.0}, 1.0)
    assert seen.shown(SAMPLES) == {"loss": 40.0}
