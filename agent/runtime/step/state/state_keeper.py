"""Keeps the state of whole updates: checkpoints of it on disk and in memory, and what is saved where training ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from atoll.agent.runtime.channel.agreement import Agreed
from atoll.agent.runtime.checkpoints.disk import fence
from atoll.agent.runtime.checkpoints.last_save import save_last
from atoll.agent.runtime.checkpoints.memory.checkpoint_tier import CheckpointTier
from atoll.agent.runtime.checkpoints.memory.cost.state_size import StateBytes, size_of_state
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import HeldGenerations, Recovered
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation
from atoll.agent.runtime.checkpoints.restore import Resumed, restore, work_of
from atoll.agent.runtime.checkpoints.saver import Saver
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.as_one import as_one
from atoll.agent.runtime.model.durable import BetweenViews, Handover, NothingBeside, Origin, SurvivorState
from atoll.agent.runtime.model.model_part import ModelPart
from atoll.agent.runtime.model.snapshot import Snapshot, Tracked
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.drivers.step_driver import StepDriver
from atoll.agent.runtime.step.state.shutdown import Shutdown
from atoll.agent.runtime.step.state.strategy_change import UnsentGradients, average_moments, handed_momentum
from atoll.errors import CheckpointError
from atoll.v1.common_pb2 import LEVEL_WARNING


class StateKeeper:
    """Used by the training thread; `pause` and `resume` of `memory`, and `shutdown.overdue`, by others too."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Tracked],
        exchange: StepDriver,
        *,
        part: ModelPart | None = None,
    ) -> None:
        """part: what of the model this rank has; None: all of it."""
        self._session, self._model, self._optimizers, self._tracked = session, model, optimizers, tracked
        one = as_one(optimizers)
        self._optimizer = part.numbered(one) if part is not None else one
        self.snapshot = Snapshot(model, self._optimizer, tracked, exchange.durable, part)
        self._updating = threading.Lock()
        self._holds_updating = False
        self.saver = Saver(session, self.snapshot)
        self.memory = CheckpointTier(session, self.snapshot, exchange.coordination.channel.in_use)
        self.shutdown = Shutdown(session, self.snapshot, self.saver, exchange, updating=self._updating, hold=self.hold)
        self._group_sizes = self._sizes_of_groups()
        self._keeps = self.saver.enabled or (session.link is not None and session.link.makes_views)
        """Snapshots are taken at boundaries: for checkpoints, or for the next view."""
        self.bytes = StateBytes(0, 0)  # of checkpoints in memory, where there are any
        self.resumed: Resumed | None = None
        """The checkpoint from which this run went on."""
        self.unsent = UnsentGradients(model)
        self.survived: SurvivorState | None = None
        """Of the view that a loss ended, until the next one is begun."""
        self.begun_view = session.view
        """The newest that this rank has begun."""

    def restore(self, loader: Loader[object]) -> None:
        """Collective. Raises CheckpointError for a checkpoint of another model, PeerLost."""
        restored = restore(self._session, self.saver, self._model, self._optimizer, loader, snapshot=self.snapshot)
        self.resumed = restored.resumed
        for name in self._tracked:
            self.restore_tracked(name)
        if self.saver.enabled and self.snapshot.part is None:
            self.snapshot.take(loader.position)
            self.bytes = size_of_state(self._model, self._optimizers, self.snapshot)
            self.memory.start(restored.step, restored.generation, self.bytes)

    def newest_in_memory(self, oldest: int) -> Recovered:
        """Collective: what the members of a view hold of the run together, of this step or a later one. Raises
        CheckpointError where no such generation is whole, PeerLost."""
        self.memory.close()
        found: Recovered | None = None
        if (memory := self._session.memory) is not None:
            held = HeldGenerations(self._session, memory.folders, self.snapshot.prepared, newest_run=self._session.run)
            found = held.newest((0, 0), oldest)
            if found is None and (newest := held.newest_step()) is not None and newest < oldest:
                raise CheckpointError(
                    f"the newest copy in memory of what the lost worker kept for itself is of step {newest}, much "
                    "training ago, as over thin links"
                )
        if found is None:
            raise CheckpointError(
                "what the lost worker kept for itself is not in the memory of those who are left: no copy was whole "
                "yet, as over thin links, or there are none (memory_replicas)"
            )
        return found

    def stands_broken(self, updated_to: Position | None) -> SurvivorState | None:
        """Keep the state after a loss without a rollback.

        That is the state of the last boundary, or of `updated_to` if it was updated since.

        Returns the state that this rank alone has; None if other ranks' state is of no use to it."""
        self.hold()
        self.saver.wait_for_reads()
        durable = self.shutdown.exchange.durable
        durable.freeze()
        if self.shutdown.updated and not (durable.survives_update and updated_to is not None):
            return None
        if self.shutdown.updated and updated_to is not None:
            self.snapshot.take(updated_to)
            self.shutdown.updated = False
        self.survived = durable.survivor_state()
        return self.survived

    def go_back(self, resumed: Resumed) -> None:
        """Restore the state from memory. Raises CheckpointError."""
        self.survived = None
        self.shutdown.updated = True  # until all of it is: nothing of this is saved
        resumed.restore(self._model, as_one(self._optimizers), self.snapshot.prepared)
        for name, tracked in self._tracked.items():
            resumed.restore_tracked(name, tracked)
        self.snapshot.take(resumed.position)

    def begin_view(self, exchange: StepDriver, step: int, generation: Generation | None, *, is_other: bool) -> None:
        """Collective: other members go on with the state as it is, from `step`. generation: where that came from
        memory. is_other: by another strategy, which keeps other state. Raises PeerLost."""
        self.shutdown.exchange = exchange
        self.snapshot.durable = exchange.durable
        self.memory.close()
        complete_step = self.memory.complete_step
        self.memory = CheckpointTier(self._session, self.snapshot, exchange.coordination.channel.in_use)
        directory, place = self._session.checkpoint.directory, self._session.place
        if self.snapshot.part is not None:
            self.snapshot.part = self.snapshot.part.in_view(place.rank, place.world_size)
        if directory is not None:
            fence.take(directory, self._session.run, self._session.view)
            writes, writers = work_of(self._session, directory)
            part = self.snapshot.part
            self.saver.share_work(writes=writes if part is None else part.writes, writers=writers)
        if directory is not None and self.snapshot.part is None:
            if is_other or self.bytes == StateBytes(0, 0):  # it joins
                self.bytes = size_of_state(self._model, self._optimizers, self.snapshot)
            self.memory.start(step, generation, self.bytes, complete_step=complete_step)

    def between_views(self, exchange: StepDriver, origin: Origin) -> None:
        """The view before is left for good, and no next one is begun: what counts is the model and `origin`."""
        between = BetweenViews(origin, self._model, self.survived)
        exchange.durable = self.snapshot.durable = between
        self.shutdown.exchange = exchange

    def become_replica(self, exchange: StepDriver, handed_over: Handover, share: float) -> None:
        """Give this rank the state of all, so that another strategy can begin with it. Collective; raises PeerLost.

        handed_over: by all ranks, nothing kept. share: of this rank, of a whole batch."""
        group = self._session.group
        if handed_over.own_moments:
            average_moments(group, self._optimizers, share)
        if group is not None:
            group.barrier()  # no rank is a replica before all have handed over
        self.unsent.put(handed_over)
        if handed_momentum(handed_over) and self._session.place.is_main:
            self._session.notice(LEVEL_WARNING, "the momentum of gradients that were not sent ends with their strategy")
        self.stays_replica(exchange)

    def stays_replica(self, exchange: StepDriver) -> None:
        """Read no more of the strategy's own state: model and optimizers are the whole state."""
        self.memory.close()
        exchange.durable = self.snapshot.durable = NothingBeside()
        exchange.needs_rollback = False
        self.shutdown.exchange = exchange

    def view_begun(self) -> None:
        self.survived, self.begun_view = None, self._session.view

    def restore_tracked(self, name: str) -> None:
        """Give a tracked object its state of the checkpoint from which this run went on."""
        if self.resumed is not None:
            try:
                self.resumed.restore_tracked(name, self._tracked[name])
            except CheckpointError as error:
                self._session.notice(LEVEL_WARNING, str(error))

    def start(self, position: Position) -> None:
        """Training begins at `position`. Raises CheckpointError if a state dict holds what no checkpoint can."""
        if self.saver.enabled:
            self.snapshot.take(position)
            self.saver.check_packable()

    def change_begins(self) -> None:
        """Weights, moments or shared parameters are about to change: what a checkpoint still reads is read first."""
        self._wait_for_reads()
        self.snapshot.forget()

    def hold(self) -> None:
        """Keep other threads from saving: between here and `released` the state may be half an update.

        Repeating it is harmless. Waits while another thread saves; that thread ends the process."""
        if not self._holds_updating:
            self._updating.acquire()
            self._holds_updating = True

    def released(self) -> None:
        """Let other threads save: the update is whole."""
        if self._holds_updating:
            self._holds_updating = False
            self._updating.release()

    def _wait_for_reads(self) -> None:
        self.saver.wait_for_reads()
        self.memory.wait_for_reads()

    def update_begins(self) -> None:
        """optimizer.step() does. From here on until `whole`, nobody else saves."""
        self.hold()
        if self._keeps:
            self._wait_for_reads()
            self.snapshot.note_writes()

    def whole(self, position: Position, agreed: Agreed, *, snapshot: bool, to_disk: bool) -> None:
        """Note that the update is whole, at a boundary.

        snapshot: begin the checkpoints that are due; to_disk: on disk too."""
        self.hold()
        self.shutdown.updated = False
        self._tell_changed_groups()
        if snapshot and self._keeps:
            self.change_begins()
            self.snapshot.take(position)
        if snapshot and self.saver.enabled:
            if to_disk:
                self.saver.at_boundary(position.step)
            complete = self.memory.at_boundary(agreed.memory)
            if complete is not None and self._session.link is not None:
                self._session.link.outbox.add(memory_step=complete)

    def _sizes_of_groups(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _tell_changed_groups(self) -> None:
        """Once: before a checkpoint is written that the script, as it prepares its optimizer, cannot load."""
        now = self._sizes_of_groups()
        if now != self._group_sizes and self.saver.enabled:
            self._session.notice(
                LEVEL_WARNING,
                f"the optimizer has groups of {now} parameters, and had {self._group_sizes} at run.prepare: "
                "checkpoints from here on fit a script that gives run.prepare the new groups. Add them before, at lr=0",
            )
        self._group_sizes = now

    def stands(self, position: Position) -> None:
        """Keep the state of a boundary with a whole update, from which the next view begins."""
        self.hold()
        self.shutdown.updated = False
        self.change_begins()
        self.snapshot.take(position)
        self.released()

    def save_last(self) -> None:
        """Training is done. Where gradients wait for an update that never comes, the last checkpoint stays. Raises
        PeerLost."""
        if self.saver.enabled and not self.shutdown.updated:
            with self.shutdown.obeyed():  # a stop that was asked for: every rank ends anyway, when this is over
                save_last(self._session, self.saver)

    def close(self) -> None:
        self.saver.close()
        self.memory.close()
