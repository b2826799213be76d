"""Fits the line of a device's peak memory over its local batch, which tells how many samples it holds. Pure.

Activations and their gradients grow with the batch; parameters, optimizer state and workspaces do not."""

from __future__ import annotations

from typing import Final, NamedTuple

MARGIN: Final = 0.1
"""Share of the memory that stays free: allocators leave gaps, and samples differ in size."""
MIN_RATIO: Final = 1.1
"""Least ratio of two batches from which a slope is read: the noise of nearer ones is as large as their difference."""
MAX_SAMPLES: Final = 2**31 - 1


class Peak(NamedTuple):
    """Peak memory in steps of this many samples."""

    batch: int
    bytes: int


class MemoryModel:
    """Peak memory of one worker process over its local batch, from the smallest and the largest batch that it trained:

        peak(b) = base + slope b

    With one batch, all that grew since before the first pass counts as the samples' own. That is too much, so it is
    safe for larger batches."""

    def __init__(self, base_bytes: int, *, falls: bool) -> None:
        """base_bytes: in use before the first pass. falls: the peak of a smaller batch is known after a larger one too.
        A process on a CPU keeps what it has freed, so its peaks only rise."""
        self._base_bytes, self._falls = base_bytes, falls
        self._smallest = self._largest = Peak(0, 0)

    def observe(self, batch: int, peak_bytes: int) -> None:
        """Count the peak of steps of this batch, at least 1."""
        if batch >= self._largest.batch:
            if batch > self._largest.batch or peak_bytes > self._largest.bytes:
                alone = self._smallest.batch in (0, batch)
                self._largest = Peak(batch, peak_bytes)
                self._smallest = self._largest if alone else self._smallest
        elif self._falls and (batch < self._smallest.batch or self._smallest.batch == batch):
            repeated = batch == self._smallest.batch
            self._smallest = Peak(batch, max(peak_bytes, self._smallest.bytes) if repeated else peak_bytes)

    def max_batch(self, memory_bytes: int) -> int:
        """Return the largest batch that leaves MARGIN of `memory_bytes` free, at least 1; 0 before the first peak."""
        small, large = self._smallest, self._largest
        if not large.batch:
            return 0
        slope = (large.bytes - self._base_bytes) / large.batch
        if large.batch >= MIN_RATIO * small.batch:
            slope = min(slope, (large.bytes - small.bytes) / (large.batch - small.batch))
        if slope <= 0:
            return MAX_SAMPLES
        spare_bytes = (1 - MARGIN) * memory_bytes - large.bytes
        return int(min(max(large.batch + spare_bytes / slope, 1), MAX_SAMPLES))
