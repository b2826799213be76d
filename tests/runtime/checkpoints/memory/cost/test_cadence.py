from __future__ import annotations

from atoll.agent.runtime.checkpoints.memory.cost.cadence import Cadence, CadenceNotice


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
