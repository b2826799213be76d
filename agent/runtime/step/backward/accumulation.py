"""Counts the batches whose gradients an update adds up: each sample of its noise scale is of so many."""

from __future__ import annotations

from typing import Final

from atoll.agent.runtime.data.sampler import BatchSlice

NORMS_EVERY_STEPS: Final = 10


class Accumulation:
    """`begin` before each pass that counts, `updated` after each optimizer.step()."""

    def __init__(self) -> None:
        self.batches = 1
        """Of the loader, in each of the last two updates that had as many as the one before."""
        self._before = 1
        self._now = 0  # batches of the update under way
        self._step, self._weight = -1, 0.0  # of its newest batch
        self._alone = True  # none of its gradients was exchanged, and all have the same weight

    def begin(self, batch: BatchSlice, *, first: bool, local: bool) -> int:
        """Return how many batches p.grad will be of, where squared norms are sampled in this pass; 0 elsewhere.

        A sample needs the gradient of this rank alone beside the combined one: no earlier pass of the update may have
        been exchanged. first: of the update. local: as Pass."""
        if first:
            self._now, self._alone, self._weight = 0, True, batch.weight
        if not self._now or batch.step != self._step:
            self._now, self._step = self._now + 1, batch.step
        alone = self._alone and batch.weight == self._weight
        self._alone = alone and local
        due = batch.step % NORMS_EVERY_STEPS < self.batches  # one pass of an update in ten steps, whichever it is
        return self._now if alone and due and not local else 0

    def updated(self) -> bool:
        """An optimizer made its update. Return whether `batches` is another now."""
        now, self._now = self._now, 0
        if not now:  # another optimizer of the same pass
            return False
        changed, self._before = now == self._before != self.batches, now
        if changed:
            self.batches = now
        return changed
