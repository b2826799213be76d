"""Reads how busy, full and hot the devices of this node are: GPUs from NVML, the CPU from the kernel.

What a device cannot tell is absent from its sample. A GPU that tells nothing at all any more (it fell off the bus, its
driver is being replaced) has a sample with nothing in it, until it is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Protocol

import psutil

from atoll.agent.telemetry.devices import Device, nvml_answer
from atoll.v1.common_pb2 import DeviceSample

logger = logging.getLogger(__name__)

SAMPLE_S: Final = 1.0
_STOP_S: Final = 2.0
_CPU_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal")


class Gauges(Protocol):
    """Used by one thread; `read` may take as long as a driver does."""

    def read(self) -> list[DeviceSample]:
        """One sample for each device."""

    def close(self) -> None: ...


def gauges_of(devices: Sequence[Device]) -> Gauges:
    return NvmlGauges(devices) if any(device.kind == "cuda" for device in devices) else CpuGauges(devices)


class CpuGauges:
    """The CPU, of which a node has one device."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._indices = [device.index for device in devices]
        self._begun = False

    def read(self) -> list[DeviceSample]:
        memory = psutil.virtual_memory()
        percent = psutil.cpu_percent()  # since the last call of this thread: the first has nothing to tell
        utilisation = min(max(percent / 100, 0.0), 1.0) if self._begun else None
        self._begun = True
        used, temperature_c = memory.total - memory.available, _cpu_temperature_c()
        return [
            DeviceSample(
                index=index, utilisation=utilisation, memory_used_bytes=max(used, 0), temperature_c=temperature_c
            )
            for index in self._indices
        ]

    def close(self) -> None: ...


def _cpu_temperature_c() -> float | None:
    """Return the temperature of the hottest part of the processor; None if unknown (virtual machines, macOS)."""
    ask = getattr(psutil, "sensors_temperatures", None)
    chips = ask() if ask is not None else {}
    found = [sensor.current for chip in _CPU_SENSORS for sensor in chips.get(chip, ())]
    return max(found, default=None)


class NvmlGauges:
    """GPUs. NVML is opened by the first `read`, and anew when none of them answers any more."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = [device for device in devices if device.kind == "cuda"]
        self._handles: dict[int, Any] = {}  # by index; of those that NVML found
        self._open = False
        self._silent: set[int] = set()

    def read(self) -> list[DeviceSample]:
        if not self._open:
            self._handles = self._find()
        samples = [self._sample(device) for device in self._devices]
        self._note({sample.index for sample in samples if sample == DeviceSample(index=sample.index)})
        if len(self._silent) == len(self._devices):
            self.close()
        return samples

    def close(self) -> None:
        import pynvml

        if self._open:
            self._open, self._handles = False, {}
            nvml_answer(pynvml.nvmlShutdown)

    def _find(self) -> dict[int, Any]:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.debug("NVML does not open: %s", error)
            return {}
        self._open = True
        found = {
            d.index: nvml_answer(pynvml.nvmlDeviceGetHandleByIndex, int(d.visible_as))
            if d.visible_as.isdigit()
            else nvml_answer(pynvml.nvmlDeviceGetHandleByUUID, d.visible_as)  # a MIG part
            for d in self._devices
        }
        return {index: handle for index, handle in found.items() if handle is not None}

    def _sample(self, device: Device) -> DeviceSample:
        import pynvml

        index = device.index
        if index not in self._handles:
            return DeviceSample(index=index)
        handle = self._handles[index]
        rates = nvml_answer(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = nvml_answer(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return DeviceSample(
            index=index,
            utilisation=min(max(rates.gpu / 100, 0.0), 1.0) if rates is not None else None,
            # Each agent of a shared GPU reports an equal part, so that their sum is what is used.
            memory_used_bytes=int(memory.used) // device.sharers if memory is not None else None,
            temperature_c=nvml_answer(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        )

    def _note(self, silent: set[int]) -> None:
        """Say which devices fell silent or are back, once."""
        for index in sorted(silent - self._silent):
            logger.warning("NVML tells nothing of device %d any more. Look at nvidia-smi and dmesg", index)
        for index in sorted(self._silent - silent):
            logger.info("NVML tells of device %d again", index)
        self._silent = silent


class Sampler:
    """Reads the gauges once a second on a thread of its own: a driver in trouble can block whoever asks it.

    `take` never waits. The thread ends with the `with` block."""

    def __init__(self, gauges: Gauges, every_s: float = SAMPLE_S) -> None:
        self._gauges, self._every_s = gauges, every_s
        self._newest: Sequence[DeviceSample] = ()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # A daemon: a driver that never answers must not keep the agent from ending.
        self._thread = threading.Thread(target=self._run, name="atoll-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closing.set()
        self._thread.join(timeout=_STOP_S)
        if self._thread.is_alive():
            logger.warning("the devices' driver did not answer within %.0f s; leaving without it", _STOP_S)

    def take(self) -> Sequence[DeviceSample]:
        """One sample for each device; none where nothing is newer than the last call."""
        with self._lock:
            newest, self._newest = self._newest, ()
        return newest

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                samples = self._gauges.read()
                with self._lock:
                    self._newest = samples
                self._closing.wait(self._every_s)
        finally:
            self._gauges.close()
