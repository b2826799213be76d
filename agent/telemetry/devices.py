"""The devices of this node: GPUs as NVML lists them, else the CPU."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.agent.memory_limits import total_bytes

logger = logging.getLogger(__name__)

MAX_DEVICES: Final = 64


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
    """What CUDA_VISIBLE_DEVICES names it by (with CUDA_DEVICE_ORDER=PCI_BUS_ID); empty for a CPU."""
    work_per_s: float = 0.0
    """Of a fixed calculation, slowed by `speed`; 0 where it was not measured. Only compared within one kind."""
    uuid: str = ""
    """Of a whole GPU; empty where it is shared out in parts (MIG), each of which may be somebody else's."""
    numa_node: int | None = None
    """That it hangs on; None: it is not known, or a CPU."""


def find_devices(speed: float = 1.0) -> tuple[Device, ...]:
    """This node's GPUs that CUDA_VISIBLE_DEVICES leaves to the agent, else its CPU as one device. Never empty."""
    return _gpus(speed, os.environ) or (_cpu(speed),)


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


def _gpus(speed: float, environ: Mapping[str, str]) -> tuple[Device, ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # no driver: the normal case on a machine without a GPU
        logger.debug("no NVML: %s", error)
        return ()
    try:
        found: list[Device] = []
        allowed = environ.get("CUDA_VISIBLE_DEVICES")
        for ordinal in range(min(pynvml.nvmlDeviceGetCount(), MAX_DEVICES)):
            handle = pynvml.nvmlDeviceGetHandleByIndex(ordinal)
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
            if allowed is not None and not is_visible(allowed, ordinal, uuid):
                continue
            model = _text(pynvml.nvmlDeviceGetName(handle))
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            whole = "" if _in_parts(pynvml, handle) else uuid
            near = numa_node_of(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
            device = Device(len(found), "cuda", model, memory, speed, str(ordinal), uuid=whole, numa_node=near)
            found.append(device)
        return tuple(found)
    except pynvml.NVMLError as error:
        logger.warning("NVML is there but cannot list the GPUs (%s): using the CPU. Look at nvidia-smi", error)
        return ()
    finally:
        pynvml.nvmlShutdown()


def _in_parts(pynvml: Any, handle: object) -> bool:
    """Whether the GPU is partitioned (MIG): agents in containers may have a part each."""
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError:  # a GPU that cannot be
        return False


def numa_node_of(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Of a PCI device as NVML names it, "00000000:3B:00.0"; None where the kernel does not know (virtual machines)."""
    domain, _, place = bus_id.lower().partition(":")
    try:
        node = int((devices / f"{int(domain, 16):04x}:{place}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def is_visible(allowed: str, ordinal: int, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES = `allowed` names the GPU, by number or by a prefix of its UUID."""
    names = [name.strip() for name in allowed.split(",")]
    return any(name == str(ordinal) or (name.startswith("GPU-") and uuid.startswith(name)) for name in names)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
