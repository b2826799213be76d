"""State of the step under way that its passes and its update share, and the count of batches in an update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.strategy_interface.capabilities import Norms
from atoll.strategies.declaration import PlanParameters

NORMS_EVERY_STEPS: Final = 10


class Accumulation:
    """Counts the batches whose gradients an update adds up: each sample of its noise scale is of so many.

    Call `begin` before each pass that counts."""

    def __init__(self) -> None:
        self.batches = 1
        """Batches of the loader in each of the last two updates that had equally many."""
        self._before = 1
        self._now = 0  # batches of the update under way
        self._step, self._weight = -1, 0.0  # of its newest batch
        self._alone = True  # none of its gradients was exchanged, and all have the same weight

    def begin(self, batch: BatchSlice, *, first: bool, local: bool) -> int:
        """Return how many batches p.grad will be of, if squared norms are sampled in this pass; else 0.

        A sample needs the gradient of this rank alone beside the combined one: no earlier pass of the update may have
        been exchanged. first: of the update. local: as in Pass."""
        if first:
            self._end_update()
            self._alone, self._weight = True, batch.weight
        if not self._now or batch.step != self._step:
            self._now, self._step = self._now + 1, batch.step
        alone = self._alone and batch.weight == self._weight
        self._alone = alone and local
        due = batch.step % NORMS_EVERY_STEPS < self.batches  # one pass of an update in ten steps, whichever it is
        return self._now if alone and due and not local else 0

    def abort(self) -> None:
        """Forget the update under way: it will not be made."""
        self._now = 0

    def _end_update(self) -> None:
        now, self._now = self._now, 0
        if now:
            if now == self._before:
                self.batches = now
            self._before = now


@dataclass(slots=True)
class PassState:
    """State of the step under way. It outlives the views of the run."""

    muted: bool = False  # nothing of what the script does in this step counts: an epoch's last batch is shown again
    params: PlanParameters = field(default_factory=PlanParameters)  # what the step's plan tells the strategy
    learning_rate_factor: float = 1.0  # of the step's plan
    open: bool = False
    broken: bool = False  # a peer was lost and the next view has not begun: passes have no effect
    gradients_pending: bool = False  # a backward pass since the last optimizer.step()
    local: bool = False  # the passes that begin now are under run.no_sync
    unsent: bool = False  # the last pass was: other ranks lack what p.grad has
    weight: float | None = None  # of this rank's gradients in the open pass; None: by samples
    sampled_batches: int = 0  # that p.grad is of, where this pass samples norms
    norms: Norms = field(default_factory=Norms)
    accumulation: Accumulation = field(default_factory=Accumulation)

    def begin_view(self) -> None:
        """Make passes count again, at a boundary whose update is whole."""
        self.broken = self.open = self.gradients_pending = self.unsent = False
        self.accumulation.abort()
