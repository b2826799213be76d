"""Times a script's steps for `atoll advise`, at two batch sizes: a worker's even share of the batch, and half of it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from atoll.agent.runtime.data.sampler import BatchSlice

WARM_UP_STEPS: Final = 3
"""First steps of a batch size that do not count: caches fill, allocators grow, kernels are chosen."""
TIMED_STEPS: Final = 10
PHASE_S: Final = 10.0
"""Seconds of a batch size after which fewer steps do."""
MIN_STEPS: Final = 2


class EndedStep(Protocol):
    """A step whose times, as step/measures/clock.py has them, are known once its device has ended it."""

    def times(self) -> Any: ...


class StepTiming:
    """Takes the place of the step reporter. write: stores a line of the trial."""

    def __init__(
        self, batch: int, workers: int, samples: int | None, write: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """batch: the script's own. workers: that would share it. samples: of the dataset; None: a stream."""
        share = max(1, round(batch / workers))
        other = share // 2 if share > 1 else 2
        most = batch if samples is None else max(samples, 1)
        self._left = sorted({min(share, most), min(other, most)})
        self._share, self._write = share, write
        self._begin_phase()

    @property
    def batch(self) -> int:
        """Return the batch size that is timed now."""
        return self._left[0]

    @property
    def enough(self) -> bool:
        """Return True if every batch size was timed."""
        return not self._left

    def take_next_batch(self) -> int | None:
        """Return the next batch size once the present one was timed; None before, and behind the last one."""
        if self.enough or not self._phase_is_over():
            return None
        del self._left[0]
        if self.enough:
            return None
        self._begin_phase()
        return self.batch

    def report(self, batch_slice: BatchSlice, lap: EndedStep, **_: object) -> None:
        """Write the times of a step of the batch size that is timed now."""
        if self.enough or batch_slice.total != self.batch:
            return
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            self._timed_from_s = time.monotonic()
            return
        times = lap.times()
        self._write(
            {
                "event": "timed",
                "batch": batch_slice.total,
                "step_s": times.step,
                "compute_s": times.compute,
                "load_s": times.load,
                "forward_s": times.forward,
                "backward_s": times.backward,
                "update_s": times.update,
                "peak_bytes": peak_bytes(),
            }
        )

    def report_density(self, density: float) -> None:
        """Write the share of gradient entries that are not zero."""
        self._write({"event": "density", "gradient_density": density})

    def finish(self) -> None:
        """Nothing waits to be written."""

    def _begin_phase(self) -> None:
        self._steps, self._begun_s = 0, time.monotonic()
        if _on_gpu():
            torch.cuda.reset_peak_memory_stats()

    def _phase_is_over(self) -> bool:
        timed = self._steps - WARM_UP_STEPS
        late = time.monotonic() - self._begun_s > PHASE_S
        return timed >= TIMED_STEPS or (late and timed >= MIN_STEPS)


def peak_bytes() -> int:
    """Return the largest memory so far: of torch on a GPU, of the whole process on a CPU."""
    if _on_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _on_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
