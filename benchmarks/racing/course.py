"""One method over the course: trained once, its model judged at intervals, its exchanges kept for any link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from racing.clock import Exchange, Network, finished_s
from racing.field import Runner
from racing.inner import Replica, Setting
from racing.task import SIZES, Batches, Task, everything, shards

DIVERGED: Final = 1e4
"""Nats. A model that saw some of the classes alone may begin with hundreds of them, and learn yet."""


@dataclass(frozen=True, slots=True)
class Course:
    """What is raced on. seed: of weights, data order and mixes."""

    size: str
    partition: str
    islands: int
    steps: int
    judge_every: int
    seed: int
    absent: bool = False  # the last island, from 40 to 60 % of the steps
    device: str = "cpu"

    def task(self) -> Task:
        return Task(SIZES[self.size], self.seed, self.device)

    def away(self, island: int, step: int) -> bool:
        return self.absent and island == self.islands - 1 and 0.4 <= step / self.steps < 0.6


@dataclass(frozen=True, slots=True)
class Lap:
    """A method's whole run. losses: (step after which, held-out nats a byte). speeds: in steps, each with as many
    examples as `rows` says; empty where that is as many on all islands."""

    losses: tuple[tuple[int, float], ...]
    exchanges: tuple[Exchange, ...]
    speeds: tuple[float, ...]
    steps: int
    rows: tuple[int, ...] = ()

    @property
    def up_bytes(self) -> float:
        """That one island sent."""
        return sum(one.up_bytes for one in self.exchanges)

    def timed(self, network: Network, step_s: float) -> list[tuple[float, float]]:
        """(virtual seconds, held-out loss). step_s: of the fastest island without network."""
        done = finished_s(self.exchanges, self.steps, [step_s / speed for speed in self.speeds], network)
        return [(done[step], loss) for step, loss in self.losses]

    def steps_to(self, target: float) -> int | None:
        return next((step + 1 for step, loss in self.losses if loss <= target), None)

    def seconds_to(self, target: float, network: Network, step_s: float) -> float | None:
        return next((time for time, loss in self.timed(network, step_s) if loss <= target), None)


def run(course: Course, task: Task, runner: Runner, setting: Setting) -> Lap:
    """Train and judge. The same course gives every method the same weights, batches and held-out windows."""
    torch.manual_seed(course.seed)
    parts = (
        [everything(task.size)] if runner.whole else shards(task.size, course.partition, course.islands, course.seed)
    )
    replicas = [
        Replica(
            task, Batches(part, task.size, course.seed, island), task.size.rate * setting.learning_rate, course.steps
        )
        for island, part in enumerate(parts)
    ]
    method = runner.build(replicas, setting)
    losses: list[tuple[int, float]] = []
    exchanges: list[Exchange] = []
    for step in range(course.steps):
        for island, replica in enumerate(replicas if not runner.whole else ()):
            replica.away = course.away(island, step)
        exchanges += method.step(step)
        if (step + 1) % course.judge_every == 0 or step + 1 == course.steps:
            losses.append((step, task.held_out(method.consolidated())))
            if not losses[-1][1] < DIVERGED:  # NaN too
                break
    speeds = tuple(part.speed / part.batches for part in parts)
    rows = tuple(replica.rows for replica in replicas)
    return Lap(tuple(losses), tuple(exchanges), speeds, losses[-1][0] + 1, rows)


def best_setting(course: Course, task: Task, runner: Runner) -> tuple[Setting, Sequence[float]]:
    """The setting with the lowest final held-out loss on this course, and each one's."""
    finals = [run(course, task, runner, setting).losses[-1][1] for setting in runner.settings]
    best = min(range(len(finals)), key=lambda one: math.inf if math.isnan(finals[one]) else finals[one])
    return runner.settings[best], finals
