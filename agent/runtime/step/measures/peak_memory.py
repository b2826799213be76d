"""Measures how much memory the steps of each local batch need, and how many samples the device holds.

On a GPU that is what torch's allocator had at most; on a CPU the resident memory of the process, within the machine's
memory and the limits of its control groups."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch

from atoll.agent.runtime.session.session import Session
from atoll.host.memory_limits import available_bytes
from atoll.step_estimators.memory_model import MemoryModel

FIRST_STEPS: Final = 4
"""Steps of a new local batch in which memory is looked at. The first ones allocate what the later ones use again."""
EVERY_STEPS: Final = 32
"""Steps between two later looks. One takes about 0.2 ms: files of /proc, or a call to the driver."""


class MemoryUse(NamedTuple):
    """One look. peak_bytes: the most so far in steps of this local batch, 0 if not looked at. memory_bytes: what this
    worker may use in all. max_batch: samples that it holds."""

    peak_bytes: int = 0
    memory_bytes: int = 0
    max_batch: int = 0


NOT_MEASURED: Final = MemoryUse()


class DeviceMemoryGauge(Protocol):
    """Memory of one device, as far as this process may use it."""

    falls: bool
    """True if the peak of a smaller batch is known after a larger one too, as MemoryModel takes it."""

    def used_bytes(self) -> int: ...

    def peak_bytes(self) -> int:
        """Return the most since `forget_peak`; 0 where the system does not say."""

    def forget_peak(self) -> None: ...

    def memory_bytes(self) -> int:
        """Return what this process may use in all."""


class CudaMemory:
    """Memory that torch's allocator has of a GPU. Other processes' is none of it."""

    falls = True

    def __init__(self, device: torch.device, sharers: int) -> None:
        self._device, self._sharers = device, sharers

    def used_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def memory_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        own = int(torch.cuda.memory_reserved(self._device))
        return min(own + free, total // self._sharers)


class HostMemory:
    """Resident memory of this process, of what the machine or its control groups have left for it."""

    falls = False

    def __init__(self, workers: int, process: Path = Path("/proc/self")) -> None:
        """workers: of this run on this machine, which share what is left."""
        self._workers, self._process = workers, process

    def used_bytes(self) -> int:
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        with suppress(OSError):  # of another system than Linux, or a container that forbids it: peaks only rise then
            (self._process / "clear_refs").write_text("5")

    def memory_bytes(self) -> int:
        return self.used_bytes() + available_bytes() // self._workers

    def _status(self, field: str) -> int:
        try:
            lines = (self._process / "status").read_text().splitlines()
        except OSError:
            return 0
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), 0)


def gauge_of(session: Session) -> DeviceMemoryGauge | None:
    """Return the gauge of the worker's device; None where nobody is told of it or its memory is not known."""
    if session.link is None:
        return None
    place = session.place
    match session.device.type:
        case "cuda":
            return CudaMemory(session.device, place.agent.gpu_sharers if place.agent is not None else 1)
        case "cpu":
            return HostMemory(place.local_world_size)
        case _:
            return None


class PeakMemory:
    """Used by the training thread alone. Call `begin` before each batch and `end_step` after it."""

    def __init__(self, gauge: DeviceMemoryGauge | None) -> None:
        self._gauge = gauge
        self._model: MemoryModel | None = None
        self._batch = self._steps = 0

    def begin(self, batch: int) -> None:
        """A pass of so many samples begins."""
        if self._gauge is None or batch == self._batch:
            return
        if self._model is None:
            self._model = MemoryModel(self._gauge.used_bytes(), falls=self._gauge.falls)
        self._batch, self._steps = batch, 0
        self._gauge.forget_peak()

    def end_step(self) -> MemoryUse:
        """Look at memory after a step, unless this is one of the many between two looks."""
        if self._gauge is None or self._model is None or not self._batch:
            return NOT_MEASURED
        self._steps += 1
        if self._steps > FIRST_STEPS and self._steps % EVERY_STEPS:
            return NOT_MEASURED
        peak_bytes, memory_bytes = self._gauge.peak_bytes(), self._gauge.memory_bytes()
        if not peak_bytes:
            return NOT_MEASURED
        self._model.observe(self._batch, peak_bytes)
        return MemoryUse(peak_bytes, memory_bytes, self._model.max_batch(memory_bytes))
