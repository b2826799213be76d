"""Sums and minima of ranks' measurements of one step, so that ranks add up in any order and grouping.

A machine adds up its own ranks, the controller the machines; no rank is counted twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from atoll.step_estimators.observed import ObservedStep

MAX_SAMPLES: Final = 2**32 - 1
"""Most samples of all ranks: a message has no more room."""


class SyncSums(NamedTuple):
    """Least time of a step's all-reduces over so many ranks. The rank that came last to a bucket waited for no
    other, so the minimum counts. A tuple: controllers make ten thousand a second."""

    ranks: int
    sync_s: float
    last_sync_s: float

    def with_ranks_of(self, other: SyncSums) -> SyncSums:
        ranks, sync_s, last_sync_s = other
        return SyncSums(self.ranks + ranks, min(self.sync_s, sync_s), min(self.last_sync_s, last_sync_s))


@dataclass(slots=True)
class NormSums:
    """Squared norms of a sampled step, of the ranks that had samples: `samples` is sum b_i, `weighted` is
    sum b_i |g_i|^2, `combined` is sum b_i |g|^2 with g the combined gradient; total_batch: of all ranks of the run.

    halves: each rank tells of the two halves of its own batch, and g in `combined` is that rank's own gradient."""

    total_batch: int
    ranks: int
    samples: int
    weighted: float
    combined: float
    halves: bool = False

    def with_ranks_of(self, other: NormSums) -> NormSums:
        self.ranks += other.ranks
        self.samples += other.samples
        self.weighted += other.weighted
        self.combined += other.combined
        return self


Sums = TypeVar("Sums", SyncSums, NormSums)


def add_ranks(steps: dict[int, Sums], step: int, told: Sums, most_steps: int) -> Sums:
    """Add ranks to the sums of a step, and return them. Beyond `most_steps`, the first step that came is dropped."""
    known = steps.get(step)
    if known is None and len(steps) == most_steps:
        del steps[next(iter(steps))]
    steps[step] = found = told if known is None else known.with_ranks_of(told)
    return found


def sync_of(observed: ObservedStep) -> SyncSums:
    return SyncSums(1, observed.sync_s, observed.last_sync_s)


def norms_of(observed: ObservedStep) -> NormSums | None:
    """None where the step was not sampled, or of more than MAX_SAMPLES."""
    if not (observed.local_grad_sqnorm > 0 and observed.global_grad_sqnorm > 0):
        return None
    batch, total = observed.local_batch * observed.sampled_batches, observed.total_batch * observed.sampled_batches
    if total > MAX_SAMPLES:
        return None
    weighted, combined = batch * observed.local_grad_sqnorm, batch * observed.global_grad_sqnorm
    return NormSums(total, int(batch > 0), batch, weighted, combined, observed.halves)
