"""The budget of generations: 1 % of training."""

from __future__ import annotations

import random

import pytest

from atoll.agent.runtime.checkpoints.memory.cost.cadence import MAX_COST_SHARE, Cadence, CadenceNotice


def told(cadence: Cadence, step_s: float, cost_s: float, generations: int = 40) -> int:
    for _ in range(generations):
        cadence.stepped(step_s)
        cadence.wrote(cost_s)
    return cadence.every


def test_what_costs_less_than_a_percent_is_done_every_step() -> None:
    assert told(Cadence(), step_s=0.1, cost_s=0.0009) == 1


def test_what_costs_more_is_done_as_seldom_as_makes_it_a_percent() -> None:
    assert told(Cadence(), step_s=0.1, cost_s=0.0072) == 8


def test_one_slow_write_changes_nothing() -> None:
    cadence = Cadence()
    told(cadence, step_s=0.1, cost_s=0.0005)
    cadence.wrote(5.0)
    assert cadence.every == 1


def test_the_first_writes_take_memory_and_count_for_a_quarter_where_that_is_much() -> None:
    cadence = Cadence()
    assert told(cadence, step_s=0.1, cost_s=0.15, generations=2) == 1
    assert told(cadence, step_s=0.1, cost_s=0.0001) == 1
    cadence = Cadence()
    assert told(cadence, step_s=0.1, cost_s=2.0, generations=1) == 500
    assert told(cadence, step_s=0.1, cost_s=0.0001, generations=4) == 1


def test_it_comes_back_when_steps_grow_longer_but_does_not_swing() -> None:
    cadence = Cadence()
    assert told(cadence, step_s=0.1, cost_s=0.0095) == 10
    assert told(cadence, step_s=0.1, cost_s=0.0085) == 10
    assert told(cadence, step_s=0.1, cost_s=0.0025) == 3


def test_a_change_is_news_when_it_stays_and_not_when_it_swings() -> None:
    news = CadenceNotice()
    assert not any(news.changed(1 + step % 2 * 3) for step in range(500))
    told = [step for step in range(200) if news.changed(4)]
    assert len(told) == 1
    assert not any(news.changed(5) for _ in range(200))
    assert sum(news.changed(1) for _ in range(200)) == 1


def test_of_the_first_two_that_count_the_cheaper_does() -> None:
    cadence = Cadence()
    told(cadence, step_s=0.1, cost_s=0.0, generations=2)
    cadence.wrote(0.9)
    assert cadence.every == 1
    cadence.wrote(0.4)
    assert cadence.every == 400


@pytest.mark.parametrize("cost_s", [0.0, 0.0005, 0.003, 0.1, 4.0])
def test_training_is_slowed_down_by_a_percent_at_most(cost_s: float) -> None:
    """1. A job trains steps of 100 ms, off by 10 %. 2. Each generation costs about the same, whatever that is. 3. After
    the first ones, which tell what it costs, all of them together cost a percent of training, and not much less where
    they cost more than that."""
    chance, cadence = random.Random(1), Cadence()
    begun, trained_s, spent_s, generations = 0, 0.0, 0.0, 0
    for step in range(200_000):
        if step - begun >= cadence.every:
            begun, generations = step, generations + 1
            took_s = cost_s * chance.lognormvariate(0.0, 0.1)
            cadence.wrote(took_s)
            spent_s += took_s if generations > 6 else 0.0
        took_s = 0.1 * chance.lognormvariate(0.0, 0.1)
        cadence.stepped(took_s)
        trained_s += took_s
    assert spent_s <= 1.1 * MAX_COST_SHARE * trained_s
    assert spent_s >= 0.6 * MAX_COST_SHARE * trained_s or cost_s < 0.001
    assert generations > 10
