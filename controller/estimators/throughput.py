"""Seconds per sample of a device, from the steps its worker measured. Pure and incremental.

A window of recent steps and its median: one late page fault, pause or checkpoint moves it by nothing, a device that
slows down for good moves it within half a window.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Final

SKIPPED_STEPS: Final = 2
"""The first steps of a run pay for allocations, autotuning and cold caches."""
NEEDED_STEPS: Final = 10
WINDOW_STEPS: Final = 32


@dataclass(frozen=True, slots=True)
class Estimate:
    """Median seconds per sample, its standard error (robust, seconds), and over how many steps."""

    seconds_per_sample: float
    error: float
    steps: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """What is remembered of one worker: seconds per sample of the newest steps under the newest plan."""

    plan: int = 0
    skipped: int = 0
    last_step: int = -1
    window: tuple[float, ...] = ()

    def observe(self, step: int, plan: int, local_batch: int, compute_s: float) -> Throughput:
        """One more step. compute_s: seconds of load, forward, backward and update, without waiting for others.

        Repeated, older and senseless samples change nothing. A new plan begins a new window: time per sample depends
        on the batch, so steps under another split would blur it.
        """
        if step <= self.last_step or plan < self.plan:
            return self
        if self.skipped < SKIPPED_STEPS:
            return replace(self, skipped=self.skipped + 1, last_step=step, plan=plan, window=())
        window = self.window if plan == self.plan else ()
        if local_batch > 0 and math.isfinite(compute_s) and compute_s > 0:
            window = (*window, compute_s / local_batch)[-WINDOW_STEPS:]
        return replace(self, plan=plan, last_step=step, window=window)

    def estimate(self) -> Estimate | None:
        """None before enough steps were seen under the newest plan."""
        if len(self.window) < NEEDED_STEPS:
            return None
        median = statistics.median(self.window)
        spread = 1.4826 * statistics.median(abs(value - median) for value in self.window)
        return Estimate(median, spread / math.sqrt(len(self.window)), len(self.window))
