from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from atoll.agent.runtime.checkpoints.memory.cost.cadence import Cadence
from atoll.agent.runtime.checkpoints.memory.cost.paired_cost import PAUSE, GenerationCost, Pairs, Pauses

STEP_S = 0.1


@dataclass
class Job:
    """Steps off by `noise`, now and then by ten times their length, and longer while a generation is under way: by
    cost_s for all of it. It takes `lasts` steps, and one begins every `every` steps where none is under way."""

    cost_s: float
    every: int = 1
    lasts: int = 1
    noise: float = 0.03

    def __post_init__(self) -> None:
        self.chance = random.Random(1)
        self.pairs, self.pauses = Pairs(), Pauses()
        self.steps: list[str] = []  # of each: "b" a generation began, "c" one was still copied, "p" pause, " " neither
        self._begun = -1000
        self._under_way = False

    def train(self, steps: int) -> None:
        for _ in range(steps):
            now = len(self.steps)
            completed = self._under_way and now - self._begun >= self.lasts
            self._under_way = self._under_way and not completed
            paused = self.pauses.at(completed=completed, under_way=self._under_way)
            begins = not self._under_way and not paused and now - self._begun >= self.every
            if begins:
                self._begun, self._under_way = now, True
            self.steps.append("b" if begins else "c" if self._under_way else "p" if paused else " ")
            took_s = STEP_S * self.chance.lognormvariate(0.0, self.noise)
            took_s += self.cost_s / self.lasts if self._under_way else 0.0
            took_s *= 10 if self.chance.random() < 0.01 else 1
            self.pairs.stepped(took_s, busy=self._under_way, begun=begins)


@pytest.mark.parametrize("lasts", [1, 17])
def test_pauses_are_free_of_copies_short_and_rare(lasts: int) -> None:
    job = Job(0.0, lasts=lasts)
    job.train(4000)
    pauses = [run for run in "".join(job.steps).replace("b", " ").replace("c", " ").split(" ") if run]
    assert {len(run) for run in pauses} == {PAUSE}
    assert len("".join(pauses)) <= 4000 * 0.045
    assert job.steps[1000:].count("p") <= 3000 * 0.03
    assert "p" not in job.steps[: 3 * lasts]


def test_too_few_pairs_say_nothing() -> None:
    job = Job(0.01)
    job.train(50)
    assert job.pairs.cost is None


@pytest.mark.parametrize(
    ("cost_s", "every", "lasts"), [(0.01, 1, 1), (0.05, 5, 1), (0.0, 1, 1), (0.3, 1, 17), (0.3, 200, 17)]
)
def test_the_cost_of_a_generation_is_found_among_noise(cost_s: float, every: int, lasts: int) -> None:
    job = Job(cost_s, every=every, lasts=lasts)
    job.train(2400 if every > 100 else 600)
    found = job.pairs.cost
    assert found is not None
    at_once = max(every, lasts) if every < 100 else lasts
    assert found.least_s <= cost_s <= found.most_s + 0.002 * at_once
    assert found.most_s - found.least_s < 0.015 * at_once


@pytest.mark.parametrize(("lasts", "within"), [(1, 80), (17, 160)])
def test_what_makes_steps_much_longer_is_known_early(lasts: int, within: int) -> None:
    """Seven tenths longer, as on machines whose processors train."""
    job = Job(0.7 * STEP_S * lasts, lasts=lasts)
    job.train(within)
    assert job.pairs.cost is not None
    assert job.pairs.cost.least_s > 0.4 * STEP_S * lasts


def test_where_one_is_always_under_way_nothing_is_said() -> None:
    pairs = Pairs()
    for step in range(600):
        pairs.stepped(STEP_S, busy=True, begun=step % 50 == 0)
    assert pairs.cost is None


def judged(cadence: Cadence, cost: GenerationCost, accounted_s: float = 0.0001) -> int:
    cadence.compared(cost)
    for _ in range(40):
        cadence.stepped(STEP_S)
        cadence.wrote(accounted_s)
    return cadence.every


def test_steps_that_are_longer_for_certain_mean_fewer_generations_and_doubt_means_as_before() -> None:
    """1. Five percent more with each generation, and three at least: every third step. 2. It may be one percent or
    five: that stays. 3. It is two at most: every second."""
    cadence = Cadence()
    assert judged(cadence, GenerationCost(0.003, 0.005)) == 3
    assert judged(cadence, GenerationCost(0.001, 0.005)) == 3
    assert judged(cadence, GenerationCost(0.0, 0.002)) == 2
    assert cadence.cost_s == 0.0001


def test_what_is_accounted_for_counts_where_it_is_more() -> None:
    assert judged(Cadence(), GenerationCost(0.0, 0.0), accounted_s=0.004) == 4
