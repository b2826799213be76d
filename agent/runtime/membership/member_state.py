"""State that a worker brings from one view of its run into the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.checkpoints.restore import Resumed
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.data.sampler import Position, after
from atoll.agent.runtime.membership.aborted_step import AbortedStep
from atoll.agent.runtime.model.as_one import as_one
from atoll.agent.runtime.model.durable import Handover
from atoll.agent.runtime.model.inputs import Likeness
from atoll.agent.runtime.model.snapshot import Tracked
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.state.state_keeper import StateKeeper


@dataclass(frozen=True, slots=True)
class PreparedObjects:
    """The objects that the script gave to `run.prepare`. likeness: what every rank must have prepared alike."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    tracked: Mapping[str, Tracked]
    loader: Loader[object]
    likeness: Likeness


class MemberState:
    """The worker's state at the last boundary with a whole update. Used by the training thread alone."""

    def __init__(self, session: Session, prepared: PreparedObjects, keeper: StateKeeper) -> None:
        self.session, self.prepared, self.keeper = session, prepared, keeper
        self.joins = session.joins
        """The worker has trained in no view yet, so it has no state to give."""
        self.handed_over: Handover | None = None
        """The state beside model and optimizer, where the worker left the last view at a boundary."""
        self.aborted: AbortedStep | None = None
        """The step that a loss ended; until the next view begins, what the script does counts for nothing."""
        self.strategy_step = 0
        """The step with which the present strategy began: copies in memory from before are another strategy's."""
        self.updated_to: Position | None = None
        """The position after the update that preceded a loss; None if the loss came before the update."""

    def abort_step(self) -> None:
        """Begin to ignore what the script does, because a peer was lost inside a step."""
        batch, updated = self.prepared.loader.current, self.keeper.shutdown.updated
        self.updated_to = after(batch) if batch is not None and updated else None
        self.aborted = self._aborted_step(whole=not updated)

    def put_back(self) -> None:
        """Give what is neither parameter nor moment its value at the last boundary, after an aborted step."""
        if self.aborted is not None:
            self.aborted.put_back()

    @property
    def position(self) -> Position:
        """The boundary from which this worker could continue."""
        if self.aborted is None:
            return self.prepared.loader.position
        position = self.keeper.snapshot.position
        assert position is not None  # a boundary came before the first pass
        return position

    @property
    def boundary_step(self) -> int:
        """The step of the last boundary; 0 before the first."""
        position = self.keeper.snapshot.position
        return position.step if position is not None else 0

    @property
    def is_whole(self) -> bool:
        """True if the parameters are those of `position`: no part of a later update is in them."""
        return self.aborted is None or self.aborted.whole

    def adopt(self, sent: LoadedCheckpoint) -> None:
        """Replace the state by that of another member. Raises CheckpointError."""
        prepared = self.prepared
        resumed = self.keeper.resumed = Resumed(sent)
        resumed.restore(prepared.model, as_one(prepared.optimizers), self.keeper.snapshot.prepared)
        for name, tracked in prepared.tracked.items():
            resumed.restore_tracked(name, tracked)
        self.set_boundary(resumed.position)

    def set_boundary(self, position: Position) -> None:
        """Take the present state for that of the boundary `position`."""
        self.keeper.snapshot.take(position)
        if self.aborted is not None:
            self.aborted = self._aborted_step(whole=True)

    def begun_view(self) -> None:
        """Forget the view before."""
        self.aborted, self.joins, self.handed_over = None, False, None

    def _aborted_step(self, *, whole: bool) -> AbortedStep:
        return AbortedStep(self.prepared.model, self.prepared.optimizers, self.keeper.snapshot, whole=whole)
