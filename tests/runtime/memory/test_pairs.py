from __future__ import annotations

import random

import pytest

from atoll.agent.runtime.memory.cadence import Cadence
from atoll.agent.runtime.memory.pairs import PAUSE, Cost, Pairs, paused

STEP_S = 0.1


def trained(pairs: Pairs, steps: int, cost_s: float, *, every: int = 1, noise: float = 0.03) -> None:
    """Steps off by `noise`, now and then by ten times their length, and longer by what a generation costs."""
    chance = random.Random(1)
    for step in range(steps):
        begun = not paused(step) and step % every == 0
        took_s = STEP_S * chance.lognormvariate(0.0, noise) + (cost_s if begun else 0.0)
        if chance.random() < 0.01:
            took_s *= 10
        pairs.stepped(took_s, pause=paused(step), begun=begun, copying=begun)


def test_pauses_are_short_and_rare() -> None:
    steps = [paused(step) for step in range(4000)]
    assert not any(steps[:50])
    assert sum(steps[:500]) <= 75
    assert sum(steps[1000:]) <= 3000 * 0.025
    assert max(len(run) for run in "".join("x" if one else " " for one in steps).split()) == PAUSE


def test_too_few_pairs_say_nothing() -> None:
    pairs = Pairs()
    trained(pairs, 150, 0.01)
    assert pairs.cost is None


@pytest.mark.parametrize(("cost_s", "every"), [(0.01, 1), (0.05, 5), (0.0, 1)])
def test_the_cost_of_a_generation_is_found_among_noise(cost_s: float, every: int) -> None:
    pairs = Pairs()
    trained(pairs, 600, cost_s, every=every)
    found = pairs.cost
    assert found is not None
    assert found.least_s <= cost_s <= found.most_s + 0.002 * every
    assert found.most_s - found.least_s < 0.015 * every


def test_steps_in_which_an_older_generation_is_still_copied_are_no_pause() -> None:
    pairs = Pairs()
    for step in range(600):
        pairs.stepped(STEP_S, pause=paused(step), begun=not paused(step), copying=True)
    assert pairs.cost is None


def judged(cadence: Cadence, cost: Cost, accounted_s: float = 0.0001) -> int:
    cadence.compared(cost)
    for _ in range(40):
        cadence.stepped(STEP_S)
        cadence.wrote(accounted_s)
    return cadence.every


def test_steps_that_are_longer_for_certain_mean_fewer_generations_and_doubt_means_as_before() -> None:
    """1. Five percent more with each generation, and three at least: every third step. 2. It may be one percent or
    five: that stays. 3. It is two at most: every second."""
    cadence = Cadence()
    assert judged(cadence, Cost(0.003, 0.005)) == 3
    assert judged(cadence, Cost(0.001, 0.005)) == 3
    assert judged(cadence, Cost(0.0, 0.002)) == 2
    assert cadence.cost_s == 0.0001


def test_what_is_accounted_for_counts_where_it_is_more() -> None:
    assert judged(Cadence(), Cost(0.0, 0.0), accounted_s=0.004) == 4
