"""Two stages of a pipeline whose messages a test carries: what comes late, early, twice, wrong, and from nobody."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.wire import packed
from atoll.agent.runtime.transport.frames import Kind
from atoll.strategies.volunteer.stage_passes import StagePass
from atoll.strategies.volunteer.stage_step import StageStep, StepPurpose
from atoll.strategies.volunteer.task_server import SELF
from atoll.strategies.volunteer.tasks import Refusal, Task

WIDTH = 3


class Passes:
    """Doubles on the way forward, counts rows on the way back."""

    size = 1

    def __init__(self, *, last: bool, whole: bool = False) -> None:
        self._last, self._whole = last, whole

    def begin(self, step: int, attempt: int) -> None: ...

    def example(self, given: torch.Tensor, step: int, *, bfloat16: bool) -> torch.Tensor:
        return torch.zeros(1, WIDTH, dtype=torch.bfloat16 if bfloat16 else torch.float32)

    def compute(self, asked: StagePass, given: list[torch.Tensor], *, keep: bool = False) -> list[torch.Tensor]:
        rows = asked.samples
        if asked.direction.value == "forward":
            return [given[0].unsqueeze(1).expand(rows, WIDTH) * 2.0]
        if self._whole:
            return [torch.tensor([float(rows)]), given[0].sum().reshape(1)]
        if self._last:
            return [torch.tensor([float(rows)]), given[0].sum().reshape(1), torch.ones(rows, WIDTH)]
        return [torch.tensor([float(rows)])]


class Pipeline:
    """Frames wait in `wire` until they are carried."""

    def __init__(self) -> None:
        self.wire: deque[tuple[int, int, int, int, int, bytes]] = deque()
        self.told: list[str] = []
        self.stages = [self._stage(rank) for rank in (0, 1)]
        for stage in self.stages:
            stage.pool.join(SELF, 1.0)
        self.stages[0].learn_shapes(1.0)
        self.carry()
        self.stages[1].learn_shapes(1.0)

    def _stage(self, rank: int) -> StageStep:
        def send(to: int, step: int, attempt: int, micro: int, payload: bytes | memoryview) -> None:
            self.wire.append((rank, to, step, attempt, micro, bytes(payload)))

        passes: Any = Passes(last=rank == 1)
        return StageStep(
            StagePlace(rank, 2, 1), passes, (rank, rank + 1), send, lambda what, wrong: self.told.append(what)
        )

    def carry(self) -> list[str | None]:
        """All that waits, and what follows of it by itself; returns why each was refused."""
        refused = []
        while self.wire:
            origin, to, step, attempt, micro, payload = self.wire.popleft()
            refused.append(self.stages[to].deliver(Kind.DIRECT, origin, step, attempt, micro, payload))
        return refused

    def compute(self, rank: int, most: int = 100) -> int:
        """Up to so many of the stage's tasks; returns how many there were."""
        stage, done = self.stages[rank], 0
        while done < most and (task := stage.pool.ask(SELF, 0.0)) is not None:
            answer = stage.compute_own(task)
            assert isinstance(stage.pool.answer(SELF, task.number, 0.0), Task)
            stage.take(SELF, task, answer)
            done += 1
        return done

    def finish(self) -> None:
        while not all(stage.finished for stage in self.stages):
            computed = self.compute(0) + self.compute(1)
            assert self.carry() or computed, "nothing goes on"

    def lie_found(self, rank: int) -> None:
        with self.stages[rank].changed:
            self.stages[rank].begin_again()

    def begin(self, step: int, micros: list[list[int]]) -> None:
        for stage in self.stages:
            stage.begin(step, micros)


MICROS = [[5, 6, 7], [8, 9]]


def test_a_step_goes_forward_and_back_and_ends_on_all_stages() -> None:
    pipeline = Pipeline()
    pipeline.begin(0, MICROS)
    pipeline.finish()
    first, last = pipeline.stages
    assert (first.samples, last.samples) == (5, 5)
    assert (float(first.sum_P), float(last.sum_P)) == (5.0, 5.0)
    assert last.loss == 2 * WIDTH * sum(sum(micro) for micro in MICROS)


def test_no_stage_is_finished_before_all_are_done_and_one_without_samples_is() -> None:
    pipeline = Pipeline()
    pipeline.begin(0, [])
    assert [stage.finished for stage in pipeline.stages] == [False, False]
    pipeline.carry()
    assert [stage.finished for stage in pipeline.stages] == [True, True]


def test_what_a_stage_sends_of_a_step_that_the_next_has_not_begun_waits_for_it() -> None:
    pipeline = Pipeline()
    pipeline.begin(0, MICROS)
    pipeline.finish()
    pipeline.stages[0].begin(1, MICROS)
    pipeline.compute(0)
    assert pipeline.carry() == [None] * len(MICROS)
    assert pipeline.compute(1) == 0
    pipeline.stages[1].begin(1, MICROS)
    pipeline.finish()
    assert pipeline.stages[1].samples == 5


def test_a_step_that_one_stage_begins_again_begins_again_on_both_and_nothing_of_it_counts_twice() -> None:
    """1. The first stage has one micro-batch's gradients already. 2. It finds a lie: both begin again. 3. What the last
    stage had sent of the first attempt is of an old one."""
    pipeline = Pipeline()
    pipeline.begin(0, MICROS)
    pipeline.compute(0)
    pipeline.carry()
    pipeline.compute(1, most=1)
    pipeline.carry()
    pipeline.compute(0, most=1)
    assert pipeline.stages[0].samples == 3
    pipeline.compute(1)
    pipeline.lie_found(0)
    assert pipeline.told == ["step 0 begins again: something counted in it that may be wrong"]
    assert "old step" in pipeline.carry()
    pipeline.finish()
    assert [stage.samples for stage in pipeline.stages] == [5, 5]
    assert [float(stage.sum_P) for stage in pipeline.stages] == [5.0, 5.0]


def test_a_stage_that_has_said_that_it_is_done_begins_nothing_again() -> None:
    pipeline = Pipeline()
    pipeline.begin(0, MICROS)
    pipeline.finish()
    pipeline.lie_found(1)
    assert not pipeline.wire
    assert all(stage.finished for stage in pipeline.stages)


def test_a_task_of_an_attempt_that_is_over_is_not_computed() -> None:
    pipeline = Pipeline()
    pipeline.begin(0, MICROS)
    task = pipeline.stages[0].pool.ask(SELF, 0.0)
    assert task is not None
    pipeline.lie_found(0)
    assert pipeline.stages[0].compute_own(task) == pipeline.stages[0].compute(task) == []


@pytest.mark.parametrize(
    ("origin", "step", "micro", "payload", "why"),
    [
        (0, 0, 0, b"", "malformed"),
        (0, 0, 0, b"\x63", "malformed"),
        (0, 0, 0, bytes(packed(StepPurpose.FORWARD, torch.zeros(3, WIDTH)))[:-1], "malformed"),
        (0, 0, 0, bytes(packed(StepPurpose.BACKWARD, torch.zeros(3, WIDTH))), "none of its neighbours"),
        (7, 0, 0, bytes([StepPurpose.DONE]), "none of its neighbours"),
        (0, 9, 0, bytes([StepPurpose.DONE]), "step too far ahead"),
        (0, 0, 0, bytes(packed(StepPurpose.FORWARD, torch.zeros(2, WIDTH))), "malformed"),
        (0, 0, 0, bytes(packed(StepPurpose.FORWARD, torch.zeros(3, WIDTH, dtype=torch.float64))), "malformed"),
        (0, 0, 5, bytes(packed(StepPurpose.FORWARD, torch.zeros(3, WIDTH))), "malformed"),
    ],
)
def test_wrong_messages_are_refused_by_name(origin: int, step: int, micro: int, payload: bytes, why: str) -> None:
    """Activations of another shape or dtype, of a micro-batch that is none, messages of who is no neighbour, or of a
    step that is far: what a stage of this run would never send ends the step."""
    pipeline = Pipeline()
    pipeline.begin(0, MICROS)
    stage = pipeline.stages[1]
    assert stage.deliver(Kind.DIRECT, origin, step, 0, micro, payload) == why
    broken = why == "malformed" and len(payload) > 1
    assert (stage.broken is not None) == broken


def test_what_counted_on_a_rank_that_is_left_counts_on_and_each_sample_once() -> None:
    """1. A rank with the whole model has made two of its samples, a volunteer has a task of others. 2. A peer is lost:
    what counted is told, and the volunteer's answer is late. 3. The step goes on with another part of what is left. 4.
    A lie is found: what counted before is computed again, too. 5. Of the next step nothing counted yet."""
    passes: Any = Passes(last=True, whole=True)
    stage = StageStep(StagePlace(0, 1, 2), passes, (0, 0), lambda *_: None, lambda *_: None)
    for client in (SELF, "v/0"):
        stage.pool.join(client, 1.0)
    stage.begin(3, [[5, 6], [7, 8]])

    def compute_all() -> None:
        while (task := stage.pool.ask(SELF, 0.0)) is not None:
            answer = stage.compute_own(task)
            assert stage.pool.answer(SELF, task.number, 0.0) is task
            stage.take(SELF, task, answer)

    theirs = stage.pool.ask("v/0", 0.0)
    assert theirs is not None
    compute_all()
    done = [one for one in (5, 6, 7, 8) if one != 5 + theirs.begin + 2 * theirs.micro]
    assert stage.counted(3) == stage.counted(3) == done
    assert stage.pool.answer("v/0", theirs.number, 0.0) is Refusal.OLD_STEP
    stage.enter(StagePlace(0, 1, 1), lambda *_: None)
    stage.begin(3, [[20]], done)
    assert not stage.finished
    compute_all()
    assert stage.finished
    assert (stage.samples, float(stage.sum_P), stage.loss) == (4, 4.0, sum(done) + 20)
    with stage.changed:
        stage.begin_again()
    compute_all()
    assert (stage.samples, float(stage.sum_P), stage.loss) == (4, 4.0, sum(done) + 20)
    assert stage.counted(4) == []
    stage.begin(4, [[1]])
    compute_all()
    assert (stage.samples, float(stage.sum_P)) == (1, 1.0)
