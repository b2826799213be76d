from __future__ import annotations

from atoll.agent.runtime.agent_link.outbox import Outbox
from atoll.telemetry.telemetry_limits import MAX_REPORTS, MAX_STEPS
from atoll.v1.agents_pb2 import Prepared
from atoll.v1.common_pb2 import StepSample, WorkerId

ID = WorkerId(job="a", run=1)


def test_steps_beyond_the_bound_and_those_that_could_not_leave_are_counted_as_dropped() -> None:
    outbox = Outbox()
    for step in range(MAX_STEPS + 3):
        outbox.step(StepSample(step=step))
    first = outbox.take(ID)
    assert first is not None
    assert (first.steps[0].step, len(first.steps), first.dropped_steps) == (3, MAX_STEPS, 3)
    outbox.add(dropped_steps=len(first.steps))
    second = outbox.take(ID)
    assert second is not None
    assert (len(second.steps), second.dropped_steps) == (0, MAX_STEPS + 3)
    assert outbox.take(ID) is None


def test_the_number_of_entries_is_in_every_message_so_that_a_controller_that_comes_later_hears_it() -> None:
    outbox = Outbox()
    outbox.add(prepared=Prepared(entries=25_000_000))
    first = outbox.take(ID)
    outbox.step(StepSample(step=1))
    second = outbox.take(ID)
    assert first is not None
    assert second is not None
    assert (first.prepared.entries, second.prepared.entries) == (25_000_000, 25_000_000)


def test_a_report_in_each_step_is_kept_as_long_as_the_steps_are() -> None:
    outbox = Outbox()
    for step in range(MAX_STEPS + 3):
        outbox.step(StepSample(step=step))
        outbox.metrics(step, {"loss": 1.0})
    sent = outbox.take(ID)
    assert sent is not None
    assert [one.step for one in sent.metrics] == [one.step for one in sent.steps]
    assert len(sent.metrics) == MAX_REPORTS
