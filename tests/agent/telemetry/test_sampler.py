from __future__ import annotations

import threading

import pytest

from atoll.agent.telemetry import gauges as sampler
from atoll.agent.telemetry.gauges import Sampler
from atoll.v1.common_pb2 import DeviceSample


class CountingGauges:
    """Reads 1, 2, 3 ...; after the third it does not answer until it is let go."""

    def __init__(self) -> None:
        self.reads = 0
        self.third, self.let_go = threading.Event(), threading.Event()
        self.closed_by = ""

    def read(self) -> list[DeviceSample]:
        self.reads += 1
        if self.reads == 4:
            self.third.set()
            assert self.let_go.wait(30)
        return [DeviceSample(index=0, memory_used_bytes=self.reads)]

    def close(self) -> None:
        self.closed_by = threading.current_thread().name


def test_the_newest_reading_is_given_once_and_whoever_takes_it_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_STOP_S", 30.0)
    gauges = CountingGauges()
    with Sampler(gauges, every_s=0.001) as one:
        assert gauges.third.wait(30)
        assert [sample.memory_used_bytes for sample in one.take()] == [3]
        assert list(one.take()) == []  # the driver does not answer
        gauges.let_go.set()
    assert gauges.closed_by == "atoll-sampler"


def test_a_driver_that_does_not_answer_does_not_keep_the_agent_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampler, "_STOP_S", 0.01)
    gauges = CountingGauges()
    with Sampler(gauges, every_s=0.001) as one:
        assert gauges.third.wait(30)
    assert "did not answer" in caplog.text
    gauges.let_go.set()
    one._thread.join(timeout=30)
    assert not one._thread.is_alive()
