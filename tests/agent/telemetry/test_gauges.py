from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from atoll.agent.telemetry.devices import Device
from atoll.agent.telemetry.gauges import CpuGauges, NvmlGauges, gauges_of
from atoll.v1.common_pb2 import DeviceSample

GPUS = [Device(n, "cuda", "RTX", 24 << 30, 1.0, visible_as=str(ordinal)) for n, ordinal in enumerate((1, 3))]


class NVMLError(Exception):
    pass


class FakeNvml:
    """NVML as nvidia-ml-py has it. `lost`: ordinals that do not answer; `loaded`: whether there is a driver."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.loaded = self.has_temperature = True
        self.opened = self.open = 0

    def nvmlInit(self) -> None:
        if not self.loaded:
            raise NVMLError("driver not loaded")
        self.opened += 1
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, ordinal: int) -> Any:
        self._check(ordinal)
        return SimpleNamespace(ordinal=ordinal, opened=self.opened)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return self.nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("MIG-")))

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> SimpleNamespace:
        self._check(handle.ordinal, handle.opened)
        return SimpleNamespace(gpu=90 + handle.ordinal, memory=5)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> SimpleNamespace:
        self._check(handle.ordinal, handle.opened)
        return SimpleNamespace(total=24 << 30, used=handle.ordinal << 30)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        self._check(handle.ordinal, handle.opened)
        if not self.has_temperature:
            raise NVMLError("not supported")
        return 60 + handle.ordinal

    def _check(self, ordinal: int, opened: int | None = None) -> None:
        if ordinal in self.lost or not self.loaded or (opened is not None and opened != self.opened):
            raise NVMLError("GPU is lost")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def gpu(index: int, ordinal: int) -> DeviceSample:
    return DeviceSample(
        index=index, utilisation=0.9 + ordinal / 100, memory_used_bytes=ordinal << 30, temperature_c=60 + ordinal
    )


def test_gpus_tell_under_the_index_that_the_node_gave_them(nvml: FakeNvml) -> None:
    gauges = gauges_of(GPUS)
    for _ in range(2):
        assert gauges.read() == [gpu(0, 1), gpu(1, 3)]
    assert nvml.opened == 1
    gauges.close()
    gauges.close()
    assert nvml.open == 0


def test_agents_of_a_shared_gpu_report_parts_that_add_up_to_what_is_used(nvml: FakeNvml) -> None:
    (sample,) = NvmlGauges([replace(GPUS[1], sharers=3)]).read()
    assert (sample.utilisation, sample.memory_used_bytes) == (gpu(0, 3).utilisation, 1 << 30)


def test_a_mig_part_tells_under_its_uuid(nvml: FakeNvml) -> None:
    """Its name is no number: reading it as one raised in the sampler's thread, which then said nothing any more."""
    (sample,) = NvmlGauges([replace(GPUS[0], visible_as="MIG-3")]).read()
    assert sample == gpu(0, 3)


def test_what_a_gpu_cannot_tell_is_absent_and_the_rest_is_there(nvml: FakeNvml) -> None:
    nvml.has_temperature = False
    first, _ = NvmlGauges(GPUS).read()
    assert (first.HasField("temperature_c"), first.HasField("utilisation")) == (False, True)


def test_a_gpu_that_falls_off_the_bus_is_told_once_and_the_other_goes_on(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gauges = NvmlGauges(GPUS)
    gauges.read()
    nvml.lost = {3}
    for _ in range(3):
        assert gauges.read() == [gpu(0, 1), DeviceSample(index=1)]
    nvml.lost = set()
    assert gauges.read() == [gpu(0, 1), gpu(1, 3)]
    assert [record.getMessage() for record in caplog.records] == [
        "NVML tells nothing of device 1 any more. Look at nvidia-smi and dmesg",
        "NVML tells of device 1 again",
    ]
    assert nvml.opened == 1


def test_a_driver_that_is_replaced_is_opened_anew(nvml: FakeNvml) -> None:
    """Handles of the old one are worth nothing in the new one."""
    gauges = NvmlGauges(GPUS)
    gauges.read()
    nvml.loaded = False
    for _ in range(3):
        assert gauges.read() == [DeviceSample(index=0), DeviceSample(index=1)]
    nvml.loaded = True
    assert gauges.read() == [gpu(0, 1), gpu(1, 3)]
    assert (nvml.opened, nvml.open) == (2, 1)


def test_a_cpu_tells_its_memory_at_once_and_its_load_from_the_second_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sensors = {"nvme": [SimpleNamespace(current=99.0)], "coretemp": [SimpleNamespace(current=c) for c in (51.0, 64.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: sensors, raising=False)
    gauges = CpuGauges([Device(0, "cpu", "Xeon", 1, 1.0)])
    (first,) = gauges.read()
    (second,) = gauges.read()
    assert (first.HasField("utilisation"), second.HasField("utilisation")) == (False, True)
    assert 0 < first.memory_used_bytes < psutil.virtual_memory().total
    assert 0 <= second.utilisation <= 1
    assert second.temperature_c == 64.0
    monkeypatch.delattr(psutil, "sensors_temperatures")  # as on macOS
    (third,) = gauges.read()
    assert not third.HasField("temperature_c")
