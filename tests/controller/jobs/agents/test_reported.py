"""The mean of what workers report, by their parts of the batch: shown live, and kept as curves."""

from __future__ import annotations

import pytest

from atoll.controller.jobs.agents import reported
from atoll.controller.jobs.agents.reported import FEW, SILENT_S, NewPoints, Reported
from atoll.v1.common_pb2 import Metrics


def say(step: int, **values: float) -> list[Metrics]:
    return [Metrics(step=step, values=values)]


def hear(
    seen: Reported, rank: int, samples: int, reports: list[Metrics], now_s: float, *, workers: int = 3
) -> list[int]:
    return seen.observe(rank, samples, reports, now_s, workers=workers)


def kept(seen: Reported, steps: list[int]) -> dict[int, dict[str, float]]:
    return {point.step: dict(point.values) for point in NewPoints(seen, steps).points()}


def test_numbers_are_weighted_by_samples_of_the_newest_step_that_all_have() -> None:
    """1. Rank 0 has three times the batch, and is a step ahead: what is shown is of the step that both have. 2. A
    number that one alone reports is as it says. 3. Where nobody said what rank 1's part is, they count alike."""
    seen = Reported()
    hear(seen, 0, 30, [*say(4, loss=1.0, rate=0.1), *say(5, loss=9.0)], 0.0)
    hear(seen, 1, 10, say(4, loss=2.0), 0.1)
    assert seen.shown() == {"loss": pytest.approx(1.25), "rate": pytest.approx(0.1)}
    hear(seen, 1, 0, say(5, loss=1.0), 0.2)  # its part is known from before
    assert seen.shown() == {"loss": pytest.approx(7.0)}
    unknown = Reported()
    hear(unknown, 0, 30, say(5, loss=9.0), 0.1)
    hear(unknown, 1, 0, say(5, loss=1.0), 0.1)
    assert unknown.shown() == {"loss": pytest.approx(5.0)}


def test_a_member_that_says_no_more_is_not_waited_for() -> None:
    seen = Reported()
    assert seen.shown() == {}
    for rank in (0, 1):
        hear(seen, rank, 10, say(1, loss=3.0), 0.0)
    hear(seen, 0, 10, say(90, loss=1.0), SILENT_S + 0.1)
    assert seen.shown() == {"loss": 1.0}


def test_two_reports_of_a_step_are_one_whose_numbers_are_the_newest() -> None:
    seen = Reported()
    for values in ({"loss": 3.0}, {"accuracy": 0.5}, {"loss": 2.0}):
        hear(seen, 0, 10, say(7, **values), 0.0)
    assert seen.shown() == {"loss": 2.0, "accuracy": 0.5}


def test_points_are_kept_when_a_step_is_new_and_when_all_have_spoken() -> None:
    """1. Rank 0 is heard of first: its steps are kept at once. 2. Rank 1 speaks of two of them, which are kept again.
    3. What waits to be written is of what came meanwhile."""
    seen = Reported()
    first = hear(seen, 0, 30, [Metrics(step=step, values={"loss": 1.0}) for step in range(3)], 0.0)
    assert kept(seen, first) == {0: {"loss": 1.0}, 1: {"loss": 1.0}, 2: {"loss": 1.0}}
    then = hear(seen, 1, 10, [*say(0, loss=5.0), *say(1, loss=9.0, of_one=4.0)], 0.5)
    assert kept(seen, then) == {0: {"loss": 2.0}, 1: {"loss": 3.0, "of_one": 4.0}}
    assert kept(seen, first)[0] == {"loss": 2.0}


@pytest.mark.parametrize("workers", [40, 50])
def test_one_word_of_many_is_the_mean_of_all(workers: int) -> None:
    """A script that reports once, on 40 workers: all of them, or others are silent. 1. It is written down after the
    first few and after the last of all. 2. Where some say nothing, when others say something a second later."""
    seen = Reported()
    due = [hear(seen, rank, 1, say(7, loss=float(rank)), rank / 100, workers=workers) for rank in range(40)]
    assert [rank for rank, steps in enumerate(due) if steps] == [*range(FEW), *([39] if workers == 40 else [])]
    later = hear(seen, 0, 1, say(9, loss=0.0), 1.1, workers=workers)
    assert kept(seen, [*due[-1], *later])[7] == {"loss": 19.5}


def test_a_step_of_which_not_all_speak_is_kept_when_it_is_over() -> None:
    """Of three who report, two speak of step 1: what the second said is kept when nobody is waited for any more."""
    seen = Reported()
    for rank in range(3):
        hear(seen, rank, 10, say(0, loss=0.0), 0.0)
    assert hear(seen, 0, 10, say(1, loss=1.0), 1.1) == [1]
    assert hear(seen, 1, 10, say(1, loss=2.0), 1.2) == []
    hear(seen, 2, 10, say(2, loss=3.0), 1.3)
    due = hear(seen, 0, 10, say(3, loss=1.0), 1.1 + SILENT_S)
    assert kept(seen, due)[1] == {"loss": 1.5}
    hear(seen, 0, 10, say(4, loss=1.0), 1.5 + 2 * SILENT_S)
    assert kept(seen, [0, 1, 2]) == {}


def test_a_thousand_workers_are_written_down_twice_a_step() -> None:
    seen, written = Reported(), 0
    for second in range(4):
        for rank in range(1000):
            written += len(hear(seen, rank, 1, say(second, loss=1.0), second + rank / 1000, workers=1000))
    assert written <= FEW + 3 * 4


def test_steps_that_are_trained_again_are_of_who_trained_them_again() -> None:
    """1. Three workers report steps 5 to 7. 2. Rank 2 is lost, the others go back to step 6 and say something else of
    it. 3. Nothing of before is in its mean, nor in step 7's."""
    seen = Reported()
    for rank in range(3):
        hear(seen, rank, 10, [metrics for step in (5, 6, 7) for metrics in say(step, loss=100.0)], 0.0)
    hear(seen, 0, 10, [*say(6, loss=1.0), *say(7, loss=3.0)], 0.5)
    hear(seen, 1, 10, [*say(6, loss=2.0), *say(7, loss=4.0)], 0.6)
    assert kept(seen, [5, 6, 7]) == {5: {"loss": 100.0}, 6: {"loss": 1.5}, 7: {"loss": 3.5}}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that reports without end within a moment, beside another that lags: the newest stay."""
    monkeypatch.setattr(reported, "KEPT_VALUES", 1000)
    seen = Reported()
    hear(seen, 1, 10, say(0, loss=1.0), 0.0)
    many = 2000
    for step in range(many):
        hear(seen, 0, 10, say(step, loss=1.0), 0.1)
    assert len(kept(seen, [*range(many)])) <= 1000
    assert kept(seen, [many - 1]) == {many - 1: {"loss": 1.0}}
