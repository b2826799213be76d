"""The devices of this node: GPUs as NVML lists them, else the CPU."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Mapping
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
    gpus = _gpus(speed, os.environ)
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
    found: list[Device] = []
    try:
        allowed = environ.get("CUDA_VISIBLE_DEVICES")
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
    handle = pynvml.nvmlDeviceGetHandleByIndex(ordinal)
    uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    named = allowed is None or is_visible(allowed, ordinal, uuid)
    near = _numa_node(pynvml, handle)
    in_parts = _in_parts(pynvml, handle)
    parts = list(_parts(pynvml, handle)) if in_parts else []
    for part in parts:
        its = _text(pynvml.nvmlDeviceGetUUID(part))
        if named or (allowed is not None and is_visible(allowed, -1, its)):
            yield _device(pynvml, part, visible_as=its, uuid=its, near=near, speed=speed)
    if named and not parts:
        known = "" if in_parts else uuid
        yield _device(pynvml, handle, visible_as=str(ordinal), uuid=known, near=near, speed=speed)


def _device(pynvml: Any, handle: object, *, visible_as: str, uuid: str, near: int | None, speed: float) -> Device:
    model = _text(pynvml.nvmlDeviceGetName(handle))
    return Device(0, "cuda", model, _memory_bytes(pynvml, handle), speed, visible_as, uuid=uuid, numa_node=near)


def _memory_bytes(pynvml: Any, handle: object) -> int:
    """Return the memory of a GPU; that of the machine where the GPU has none of its own for NVML to report."""
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError as error:
        logger.info("NVML does not report a GPU's memory (%s): the machine's is taken for it", error)
        return total_bytes()


def _numa_node(pynvml: Any, handle: object) -> int | None:
    try:
        return numa_node_of(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    except pynvml.NVMLError:  # it is on no PCI bus
        return None


def _in_parts(pynvml: Any, handle: object) -> bool:
    """Return whether the GPU is partitioned (MIG): agents in containers may have a part each."""
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError:  # a GPU that cannot be
        return False


def _parts(pynvml: Any, handle: object) -> Iterator[object]:
    """Yield the handles of a GPU's MIG parts that this container or machine has. Their numbers may have gaps."""
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except pynvml.NVMLError:
            continue


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


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
