"""The counts that a run over thin links keeps of itself."""

from __future__ import annotations

import pytest

from atoll.strategies.shared_params.measures import Tally


def counts(tasks: float) -> dict[str, float]:
    return {"tasks": tasks, "compress_s": tasks, "sum_s": 2 * tasks, "update_s": tasks, "publish_s": tasks} | {
        "outstanding_squares": 9 * tasks,
        "update_squares": tasks,
        "rounds": tasks,
        "rounds_s": tasks / 4,
    }


def test_what_is_told_of_each_step_adds_up_to_what_is_told_of_the_run() -> None:
    counted = iter([counts(3), counts(4), counts(0), counts(0)])
    tally = Tally(lambda: next(counted), threads=2)
    tally.sparsity = 0.9
    tally.fetched(2, fresh=2, waited_s=0.2)
    tally.fetched(1, fresh=0, waited_s=0.3)
    assert tally.take_waited() == pytest.approx(0.5)
    assert tally.take_waited() == 0
    first = tally.take_step(0.5, 100)
    assert first == pytest.approx({
        "sparsity": 0.9, "stall_s": 0.5, "fresh_share": 2 / 3, "sent_bytes": 100, "select_s": 1.5, "apply_s": 4.5 + 3,
        "drift": 3, "round_s": 0.25, "every": 1, "islands": 1, "advantage": 0,
    })  # fmt: skip
    second = tally.take_step(0.0, 0)
    assert (second["fresh_share"], second["drift"]) == (0, 3)
    tally.fetched(1, fresh=1, waited_s=0.1)  # of a step under way
    assert tally.statistics()["tasks"] == 7
    assert tally.statistics() == pytest.approx({
        "tasks": 7, "compress_s": 7, "sum_s": 14, "update_s": 7, "publish_s": 7, "fresh_share": 3 / 4, "sparsity": 0.9,
        "drift": 3, "advantage": 0, "rounds": 7, "round_s": 0.25,
    })  # fmt: skip


def test_a_script_that_looks_at_the_run_takes_nothing_away_from_the_step() -> None:
    """It asked in each step: what the exchange did until then was told of no step."""
    counted = iter([counts(3), counts(1), counts(2), counts(5)])
    tally = Tally(lambda: next(counted), threads=2)
    assert [tally.statistics()["tasks"] for _ in range(2)] == [3, 4]
    told = tally.take_step(0.0, 0)
    assert (told["select_s"], told["apply_s"], told["drift"]) == (3, 9 + 6, 3)
    told = tally.take_step(0.0, 0)
    assert (told["select_s"], told["apply_s"]) == (2.5, 7.5 + 5)


def test_where_a_device_of_its_own_trains_the_exchange_takes_nothing_of_it() -> None:
    tally = Tally(lambda: counts(3), threads=0)
    told = tally.take_step(0.0, 0)
    assert (told["select_s"], told["apply_s"]) == (0.0, 0.0)


def test_drift_is_told_in_steps_and_stays_where_nothing_was_chosen() -> None:
    """1. A layer is chosen from in every fourth step: what is outstanding is 3 times four steps' updates. 2. A step in
    which nothing was chosen tells the drift of before."""
    counted = iter([counts(2), counts(0)])
    tally = Tally(lambda: next(counted), threads=1)
    tally.every = 4
    told = [tally.take_step(0.0, 0) for _ in range(2)]
    assert [one["drift"] for one in told] == [12, 12]
    assert [one["round_s"] for one in told] == [0.25, 0.25]
