"""What volunteers add to a step by the pool's rules alone, in virtual time: a rank, links of 50 Mbit/s and 50 ms, and
gradients of 650 KB; a tenth of the answers is computed again by the rank."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.strategies.volunteer.task_pool import MOST_OPEN, TaskPool

RANK = "rank"
MICROS, SAMPLES = 4, 80
SAMPLE_S, TASK_S, UPDATE_S, VARIES, COMPARED = 0.02, 0.02, 0.05, 0.1, 0.1
STEPS, LEARNED = 24, 4


@dataclass(slots=True)
class Device:
    """A volunteer. Its link takes `carry_s` for weights or a gradient; of either direction it carries one at a time."""

    speed: float
    carry_s: float
    delay_s: float
    asks: int = MOST_OPEN
    free_s: float = 0.0
    sends_s: float = 0.0
    weights: int = -1

    def answers_s(self, now_s: float, step: int, work_s: float) -> float:
        """When the answer is there to a task that is sent now."""
        arrives_s = now_s + self.delay_s + (self.carry_s if self.weights != step else 0.0)
        self.weights = step
        self.free_s = max(self.free_s, arrives_s) + work_s / self.speed
        self.sends_s = max(self.free_s, self.sends_s) + self.carry_s
        return self.sends_s + self.delay_s


@dataclass(slots=True)
class Steps:
    devices: dict[str, Device]
    draw: random.Random
    pool: TaskPool = field(default_factory=TaskPool)
    compare: list[float] = field(default_factory=list)  # seconds of tasks that the rank is to compute again
    now_s: float = 0.0
    busy: bool = False
    coming: list[tuple[float, int, str, float]] = field(default_factory=list)

    def run(self) -> float:
        """Seconds of a step."""
        self.pool.join(RANK, 1.0)
        for name, device in self.devices.items():
            self.pool.join(name, device.speed)
        return statistics.mean([self._step(step) for step in range(STEPS)][LEARNED:])

    def _step(self, step: int) -> float:
        begun_s = self.now_s
        self.pool.begin_step()
        for micro in range(MICROS):
            self.pool.add(Direction.BACKWARD, micro, SAMPLES)
        while not all(self.pool.done(Direction.BACKWARD, micro) for micro in range(MICROS)):
            self._hand_out(step)
            due_s = None if self.busy else self.pool.next_overdue_s()
            if due_s is not None and (not self.coming or self.now_s < due_s < self.coming[0][0]):
                self.now_s = max(self.now_s, due_s)
            else:
                self._happen()
        self.now_s += UPDATE_S
        return self.now_s - begun_s

    def _hand_out(self, step: int) -> None:
        for name, device in self.devices.items():
            while device.asks and (task := self.pool.ask(name, self.now_s)) is not None:
                device.asks -= 1
                work_s = self._work_s(task.samples)
                heapq.heappush(self.coming, (device.answers_s(self.now_s, step, work_s), task.number, name, work_s))
        if self.busy:
            return
        if self.compare:
            self.busy = True
            heapq.heappush(self.coming, (self.now_s + self.compare.pop(), 0, RANK, 0.0))
            return
        own = self.pool.ask(RANK, self.now_s)
        if own is None and self.pool.reclaim(self.now_s):
            own = self.pool.ask(RANK, self.now_s)
        if own is not None:
            self.busy = True
            heapq.heappush(self.coming, (self.now_s + self._work_s(own.samples), own.number, RANK, 0.0))

    def _happen(self) -> None:
        self.now_s, number, who, work_s = heapq.heappop(self.coming)
        if who == RANK:
            self.busy = False
        else:
            self.devices[who].asks += 1
            if self.draw.random() < COMPARED:
                self.compare.append(work_s)
        if number:
            self.pool.answer(who, number, self.now_s)

    def _work_s(self, samples: int) -> float:
        return samples * SAMPLE_S * (1 + VARIES * self.draw.random()) + TASK_S


def steps_per_s(speeds: Sequence[float], carry_s: float, delay_s: float) -> float:
    """Mean of six seeds."""
    found = []
    for seed in range(6):
        devices = {f"v{place}/0": Device(speed, carry_s, delay_s) for place, speed in enumerate(speeds)}
        found.append(1 / Steps(devices, random.Random(seed)).run())
    return statistics.mean(found)


@pytest.mark.parametrize(("carry_s", "delay_s"), [(0.0, 0.0), (0.105, 0.025)], ids=["at once", "thin"])
def test_volunteers_add_seven_tenths_of_their_power(carry_s: float, delay_s: float) -> None:
    """1. A rank alone. 2. One as fast as it helps. 3. One at 0.3 of the speed does, too. With tasks as large as each
    client's part of a micro-batch, and rests of a sample among them, the second one added 39 % behind such links."""
    alone, one, both = (steps_per_s(speeds, carry_s, delay_s) for speeds in ((), (1.0,), (1.0, 0.3)))
    assert one / alone - 1 > 0.75
    assert (both - one) / alone > 0.55 * 0.3
    assert both / alone - 1 > 0.72 * 1.3
