from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from atoll.agent.runtime.agent_link.outbox import Outbox
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.step.drivers.coordination import StepNumbers
from atoll.agent.runtime.step.measures.clock import HostMark, Lap, Mark, StepClock, StepTimes
from atoll.agent.runtime.step.state.step_reporter import LAG_STEPS, StepReporter
from atoll.agent.runtime.strategy_interface.capabilities import Norms
from atoll.v1.common_pb2 import StepSample, WorkerId


@dataclass
class Rig:
    """A clock whose time stands still but for `spend`."""

    now_s: float = 0.0
    clock: StepClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = StepClock(lambda: HostMark(self.now_s), lambda: self.now_s)
        self.clock.boundary_begins()

    def spend(self, seconds: float, then: Callable[[], None]) -> None:
        self.now_s += seconds
        then()

    def whole_step(self) -> None:
        clock = self.clock
        self.spend(0.5, clock.boundary_ends)  # a checkpoint is copied
        self.spend(1.0, clock.handed_out)
        clock.waited(0.25)
        self.spend(2.0 + 0.25, lambda: clock.backward_begins(seen=True))
        self.spend(1.5, clock.bucket_ready)
        self.spend(2.5, clock.bucket_ready)
        clock.waited(3.0)
        self.spend(3.0, clock.backward_ends)
        self.spend(0.75, clock.updated)
        self.now_s += 0.25


def test_parts_of_a_step_leave_waiting_and_checkpoints_out_and_sum_up_to_its_compute() -> None:
    rig = Rig()
    rig.whole_step()
    times = rig.clock.boundary_begins().times()
    assert times == StepTimes(
        step=11.75, compute=8.0, wait=3.25, load=1.0, forward=2.0, backward=4.0, first_bucket=1.5, update=1.0
    )
    assert times.load + times.forward + times.backward + times.update == times.compute


def test_step_times_tell_compute_from_waiting_without_a_batch_too() -> None:
    rig = Rig()
    rig.spend(2.0, rig.clock.boundary_ends)
    rig.now_s += 3.0
    rig.clock.waited(1.0)
    rig.clock.waited(7.0, at_boundary=True)
    assert rig.clock.boundary_begins().times() == StepTimes(step=5.0, compute=2.0, wait=8.0)
    rig.clock.boundary_ends()
    rig.now_s += 0.5
    assert rig.clock.boundary_begins().times() == StepTimes(step=0.5, compute=0.5, wait=0.0)


def two_passes(rig: Rig) -> None:
    clock = rig.clock
    clock.backward_begins(seen=True)
    rig.spend(1.0, clock.backward_ends)
    clock.backward_begins(seen=True)
    rig.spend(1.0, clock.backward_ends)
    clock.updated()


def no_update(rig: Rig) -> None:
    rig.clock.backward_begins(seen=True)
    rig.spend(2.0, rig.clock.backward_ends)


def begun_unseen(rig: Rig) -> None:
    rig.clock.backward_begins(seen=False)
    rig.spend(2.0, rig.clock.backward_ends)
    rig.clock.updated()


def no_pass(rig: Rig) -> None:
    rig.spend(2.0, lambda: None)


@pytest.mark.parametrize("train", [two_passes, no_update, begun_unseen, no_pass])
def test_a_step_that_cannot_be_cut_up_has_its_compute_and_no_parts(train: Callable[[Rig], None]) -> None:
    rig = Rig()
    rig.clock.boundary_ends()
    rig.spend(1.0, rig.clock.handed_out)
    rig.now_s += 1.0
    train(rig)
    rig.clock.waited(0.5)
    assert rig.clock.boundary_begins().times() == StepTimes(step=4.0, compute=3.5, wait=0.5)
    rig.whole_step()
    assert rig.clock.boundary_begins().times().forward == 2.0  # the next one can be


def test_the_steps_of_two_optimizers_are_one_update() -> None:
    """One has the matrices, the other the rest. Before, no step of such a script had parts, so no plan a model."""
    rig = Rig()
    rig.clock.boundary_ends()
    rig.spend(1.0, rig.clock.handed_out)
    rig.now_s += 1.0
    rig.clock.backward_begins(seen=True)
    rig.spend(2.0, rig.clock.backward_ends)
    for _ in range(2):
        rig.spend(0.25, rig.clock.updated)
    parts = StepTimes(step=4.5, compute=4.5, wait=0.0, load=1.0, forward=1.0, backward=2.0, update=0.5)
    assert rig.clock.boundary_begins().times() == parts


class LateMark:
    """As of a GPU: reached when the device has worked off what was queued before it."""

    device_s = 0.0
    waited_for = 0

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def since(self, earlier: Mark, /) -> float:
        assert isinstance(earlier, LateMark)
        if not self.reached():
            LateMark.waited_for += 1
            LateMark.device_s = self.at_s
        return self.at_s - earlier.at_s

    def reached(self) -> bool:
        return self.at_s <= LateMark.device_s


def test_steps_of_a_device_that_lags_behind_are_told_later_in_order_and_nobody_waits_but_at_the_end() -> None:
    LateMark.device_s, LateMark.waited_for = 0.0, 0
    queued_s = 0.0

    def queue(seconds: float) -> Mark:
        nonlocal queued_s
        queued_s += seconds
        return LateMark(queued_s)

    outbox = Outbox()
    reporter = StepReporter(outbox)

    def told() -> list[StepSample]:
        message = outbox.take(WorkerId(job="a", run=1))
        return list(message.steps) if message is not None else []

    def train(step: int) -> None:
        lap = Lap(0.0)
        for number in range(4):
            lap.phase_ends(number, queue(0.25))
        lap.updated()
        lap.end(1.0, queue(0.25))
        batch_slice = BatchSlice(step=step, epoch=0, start=0, total=8, local=4, weight=0.5, share=0.5)
        reporter.report(batch_slice, lap, plan=1, norms=Norms(float("nan"), 2.0), numbers=StepNumbers(sync_s=0.5))

    train(0)
    train(1)
    assert told() == []
    LateMark.device_s = 1.25  # the device is done with step 0
    train(2)
    (first,) = told()
    assert (first.step, first.forward_s, first.compute_s, first.sync_s) == (0, 0.25, 1.0, 0.5)
    assert (first.local_grad_sqnorm, first.global_grad_sqnorm) == (0.0, 2.0)  # NaN says "not sampled"
    assert LateMark.waited_for == 0
    for step in range(3, 3 + LAG_STEPS):
        train(step)
    assert [sample.step for sample in told()] == [1, 2]
    reporter.finish()
    assert [sample.step for sample in told()] == list(range(3, 3 + LAG_STEPS))
