"""Reads how busy, full and hot the devices of this node are: GPUs from NVML, the CPU from the kernel.

What a device cannot tell is absent from its sample. A GPU that tells nothing at all any more (it fell off the bus, its
driver is being replaced) has a sample with nothing in it, until it is back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import psutil

from atoll.agent.telemetry.devices import Device
from atoll.v1.common_pb2 import DeviceSample

logger = logging.getLogger(__name__)

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
        self._note({sample.index for sample in samples if not _tells(sample)})
        if len(self._silent) == len(self._devices):
            self.close()
        return samples

    def close(self) -> None:
        import pynvml

        if self._open:
            self._open, self._handles = False, {}
            _answer(pynvml.nvmlShutdown)

    def _find(self) -> dict[int, Any]:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.debug("NVML does not open: %s", error)
            return {}
        self._open = True
        found = {
            d.index: _answer(pynvml.nvmlDeviceGetHandleByIndex, int(d.visible_as))
            if d.visible_as.isdigit()
            else _answer(pynvml.nvmlDeviceGetHandleByUUID, d.visible_as)  # a MIG part
            for d in self._devices
        }
        return {index: handle for index, handle in found.items() if handle is not None}

    def _sample(self, device: Device) -> DeviceSample:
        import pynvml

        index = device.index
        if index not in self._handles:
            return DeviceSample(index=index)
        handle = self._handles[index]
        rates = _answer(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _answer(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return DeviceSample(
            index=index,
            utilisation=min(max(rates.gpu / 100, 0.0), 1.0) if rates is not None else None,
            # Each agent of a shared GPU reports an equal part, so that their sum is what is used.
            memory_used_bytes=int(memory.used) // device.sharers if memory is not None else None,
            temperature_c=_answer(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        )

    def _note(self, silent: set[int]) -> None:
        """Say which devices fell silent or are back, once."""
        for index in sorted(silent - self._silent):
            logger.warning("NVML tells nothing of device %d any more. Look at nvidia-smi and dmesg", index)
        for index in sorted(self._silent - silent):
            logger.info("NVML tells of device %d again", index)
        self._silent = silent


def _tells(sample: DeviceSample) -> bool:
    return any(sample.HasField(name) for name in ("utilisation", "memory_used_bytes", "temperature_c"))


def _answer(ask: Callable[..., Any], *arguments: object) -> Any:
    """Return NVML's answer; None if it is not supported here, or the device is gone."""
    import pynvml

    try:
        return ask(*arguments)
    except pynvml.NVMLError as error:
        logger.debug("NVML: %s", error)
        return None
