"""The devices of this node: GPUs as NVML lists them, else the CPU."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from atoll.errors import BadInput
from atoll.host.memory_limits import total_bytes

logger = logging.getLogger(__name__)

MAX_DEVICES: Final = 64
MIG: Final = "MIG-"
"""Begins the UUID of a part of a GPU."""
NO_GPU_TO_SHARE: Final = (
    "--share-gpu: there is no GPU here (see `atoll doctor`). Leave it out: each agent then trains on the CPU"
)


@dataclass(frozen=True, slots=True)
class Device:
    index: int
    """Position on this node, from 0."""
    kind: str
    """"cuda" or "cpu"."""
    model: str
    memory_bytes: int
    speed: float
    """1.0, or the share of its speed it is slowed down to."""
    visible_as: str = ""
    """Name in CUDA_VISIBLE_DEVICES (with CUDA_DEVICE_ORDER=PCI_BUS_ID); empty for a CPU."""
    work_per_s: float = 0.0
    """Rate of a fixed calculation, slowed by `speed`; 0 if not measured. Only compared within one kind."""
    uuid: str = ""
    """The UUID of a whole GPU or of a MIG part; empty for a GPU in parts that NVML does not list."""
    numa_node: int | None = None
    """NUMA node of the device; None: unknown, or a CPU."""
    sharers: int = 1
    """Agents that share the GPU. Memory and work_per_s are the part of one of them."""


def find_devices(speed: float = 1.0, sharers: int = 1) -> tuple[Device, ...]:
    """Return this node's GPUs that CUDA_VISIBLE_DEVICES leaves to the agent, else its CPU as one device. Never empty.

    sharers: agents that share each GPU. Raises BadInput where several are to share one and there is none."""
    gpus = _gpus(speed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if sharers > 1 and not gpus:
        raise BadInput(NO_GPU_TO_SHARE)
    parts = (replace(gpu, sharers=sharers, memory_bytes=gpu.memory_bytes // sharers) for gpu in gpus)
    return tuple(parts) or (_cpu(speed),)


def _cpu(speed: float) -> Device:
    return Device(0, "cpu", cpu_model(), total_bytes(), speed)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as the kernel tells it; its architecture where the kernel does not (ARM)."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name" and value.strip():
                    return value.strip()[:200]
    except OSError as error:
        logger.debug("no %s: %s", cpuinfo, error)
    return platform.machine() or "CPU"


def _gpus(speed: float, allowed: str | None) -> tuple[Device, ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # no driver: the normal case on a machine without a GPU
        logger.debug("no NVML: %s", error)
        return ()
    found: list[Device] = []
    try:
        for ordinal in range(pynvml.nvmlDeviceGetCount()):
            try:
                found += _usable(pynvml, ordinal, allowed, speed)
            except pynvml.NVMLError as error:
                logger.warning("NVML cannot read GPU %d (%s): it is left out. Look at nvidia-smi", ordinal, error)
    except pynvml.NVMLError as error:
        logger.warning("NVML is there but cannot count the GPUs (%s): using the CPU. Look at nvidia-smi", error)
    finally:
        pynvml.nvmlShutdown()
    return tuple(replace(device, index=index) for index, device in enumerate(found[:MAX_DEVICES]))


def _usable(pynvml: Any, ordinal: int, allowed: str | None, speed: float) -> Iterator[Device]:
    """Yield a GPU, or each of its MIG parts, as far as CUDA_VISIBLE_DEVICES = `allowed` names it."""
    gpu = pynvml.nvmlDeviceGetHandleByIndex(ordinal)
    uuid = pynvml.nvmlDeviceGetUUID(gpu)
    place = nvml_answer(pynvml.nvmlDeviceGetPciInfo, gpu)  # None: it is on no PCI bus
    near = numa_node_of(place.busId) if place is not None else None

    def device(handle: object, visible_as: str, uuid: str) -> Device:
        memory = nvml_answer(pynvml.nvmlDeviceGetMemoryInfo, handle)  # None: it shares the machine's
        memory_bytes = int(memory.total) if memory is not None else total_bytes()
        model = pynvml.nvmlDeviceGetName(handle)
        return Device(0, "cuda", model, memory_bytes, speed, visible_as, uuid=uuid, numa_node=near)

    named = allowed is None or is_visible(allowed, ordinal, uuid)
    mode = nvml_answer(pynvml.nvmlDeviceGetMigMode, gpu)
    in_parts = mode is not None and bool(mode[0])
    parts = list(_parts(pynvml, gpu)) if in_parts else []
    for part in parts:
        its = pynvml.nvmlDeviceGetUUID(part)
        if named or (allowed is not None and is_visible(allowed, -1, its)):
            yield device(part, its, its)
    if named and not parts:  # agents in containers may have a part each: nobody is refused for the same UUID
        yield device(gpu, str(ordinal), "" if in_parts else uuid)


def _parts(pynvml: Any, gpu: object) -> Iterator[object]:
    """Yield the handles of a GPU's MIG parts that this container or machine has. Their numbers may have gaps."""
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        if (part := nvml_answer(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, number)) is not None:
            yield part


def nvml_answer(ask: Callable[..., Any], *arguments: object) -> Any:
    """Return NVML's answer; None if it is not supported here, or the device is gone."""
    import pynvml

    try:
        return ask(*arguments)
    except pynvml.NVMLError as error:
        logger.debug("NVML: %s", error)
        return None


def numa_node_of(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of a PCI device by its NVML name, "00000000:3B:00.0"; None if unknown (virtual machines)."""
    domain, _, place = bus_id.lower().partition(":")
    try:
        node = int((devices / f"{int(domain, 16):04x}:{place}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def is_visible(allowed: str, ordinal: int, uuid: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES = `allowed` names it, by number or by a prefix of its UUID."""
    names = [name.strip() for name in allowed.split(",")]
    by_number = ordinal >= 0 and str(ordinal) in names
    return by_number or any(name.startswith(("GPU-", MIG)) and uuid.startswith(name) for name in names)
