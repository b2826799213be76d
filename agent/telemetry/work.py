"""Measures how fast this node's devices calculate: a fixed matrix product, once when the agent starts.

In a short process of its own: the daemon stays free of thread pools and of torch, and the product runs with the threads
that a worker would get. It is the device that is measured, not what others leave of it at this moment.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from atoll.agent.telemetry.devices import MIG, Device
from atoll.agent.telemetry.shared_gpu import keep_shared
from atoll.host import die_with_parent

logger = logging.getLogger(__name__)

DEADLINE_S: Final = {"cpu": 10.0, "cuda": 60.0}
"""Importing torch from a cold disk and making a context on each GPU takes a while; numpy and one CPU do not."""
_NO_FILE: Final = -1
_NO_FILES: Final[Mapping[int, int]] = {}
_PROGRAMS: Final = {"cpu": "atoll.agent.telemetry.cpu_work", "cuda": "atoll.agent.runtime.cuda_work"}


async def measured(
    devices: Sequence[Device], threads: int | None, stop: asyncio.Event, files: Mapping[int, int] = _NO_FILES
) -> tuple[Device, ...]:
    """Return the devices, all of one kind, with `work_per_s`; 0 where it could not be measured.

    It is slowed by the device's speed, and of a shared GPU it is this agent's part. threads: of a worker on a CPU;
    None: as many as there are cores. files: `lock_files`. Ends early when `stop` is set.
    """
    kind = devices[0].kind
    if kind == "cuda" and importlib.util.find_spec("torch") is None:
        logger.info("torch is not installed here: the speed of %d GPUs is not measured", len(devices))
        return tuple(devices)
    measuring = asyncio.create_task(_rates(devices, threads, files), name="measure devices")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((measuring, stopping), timeout=DEADLINE_S[kind], return_when=asyncio.FIRST_COMPLETED)
        if not measuring.done():
            if not stop.is_set():
                logger.warning("the speed of %s was not measured within %g s", kind, DEADLINE_S[kind])
            return tuple(devices)
        rates = measuring.result()
    finally:
        measuring.cancel()
        stopping.cancel()
        await asyncio.gather(measuring, stopping, return_exceptions=True)
        keep_shared(files.values())
    return tuple(
        replace(device, work_per_s=rate * device.speed / device.sharers)
        for device, rate in zip(devices, rates, strict=True)
    )


async def _rates(devices: Sequence[Device], threads: int | None, files: Mapping[int, int]) -> list[float]:
    """Measure the devices in one process, but MIG parts one by one: CUDA shows a process no second one."""
    kind = devices[0].kind
    whole = [device for device in devices if not device.visible_as.startswith(MIG)]
    groups = [*([whole] if whole else []), *([device] for device in devices if device not in whole)]
    found: dict[int, float] = {}
    for group in groups:
        passed = [files.get(device.index, _NO_FILE) for device in group]
        rates = rates_from(await _ask(kind, _environment(group, threads), passed), len(group))
        found |= {device.index: rate for device, rate in zip(group, rates, strict=True)}
    return [found[device.index] for device in devices]


def rates_from(printed: bytes, count: int) -> list[float]:
    """Parse the program's output: a rate for each device, or all 0 if it is invalid."""
    try:
        rates = [float(rate) for rate in json.loads(printed)]
    except (ValueError, TypeError):
        rates = []
    if len(rates) != count or not all(0 <= rate < math.inf for rate in rates):  # NaN is neither
        logger.warning("measuring the devices' speed gave %r: it is not known", printed[-200:])
        return [0.0] * count
    return rates


def _environment(devices: Sequence[Device], threads: int | None) -> Mapping[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    if devices[0].kind == "cuda":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(device.visible_as for device in devices)
    elif threads is not None:
        env["OMP_NUM_THREADS"] = env["OPENBLAS_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
    return env


async def _ask(kind: str, env: Mapping[str, str], files: Sequence[int]) -> bytes:
    """Return what the program for this kind prints. Cancelling kills it; so does the agent's death."""
    numbers = [str(file) for file in files] if kind == "cuda" else []
    try:
        process = await asyncio.create_subprocess_exec(
            *die_with_parent.command([sys.executable, "-P", "-m", _PROGRAMS[kind], *numbers], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            pass_fds=[file for file in files if file != _NO_FILE],
        )
    except OSError as error:
        logger.warning("cannot start a process that measures the devices: %s", error)
        return b""
    try:
        printed, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        logger.warning("measuring the devices' speed failed: %s", complaint[-500:].decode(errors="replace").strip())
    return printed
