"""Restores the newest checkpoint at a run's start: into model, optimizer and loader, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from atoll.agent.runtime.agent_link import exits
from atoll.agent.runtime.checkpoints import resume
from atoll.agent.runtime.checkpoints.disk.folders import Moment
from atoll.agent.runtime.checkpoints.memory.cost.state_size import StateBytes
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation
from atoll.agent.runtime.checkpoints.resume import Resumed
from atoll.agent.runtime.checkpoints.saver import Saver
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.model.as_one import OptimizerState
from atoll.agent.runtime.model.family import family_of
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.session.session import Session
from atoll.errors import BadInput
from atoll.v1.agents_pb2 import Prepared
from atoll.v1.common_pb2 import LEVEL_WARNING


@dataclass(frozen=True, slots=True)
class Restored:
    """step: the first to train. resumed: None where nothing was trained yet. generation: of memory, where it came from
    there."""

    step: int = 0
    resumed: Resumed | None = None
    generation: Generation | None = None


def restore(
    session: Session,
    saver: Saver,
    model: nn.Module,
    optimizer: OptimizerState,
    loader: Loader[object],
    *,
    snapshot: Snapshot,
) -> Restored:
    """Collective. Nothing where the session keeps no checkpoints. Raises CheckpointError for a checkpoint of another
    model, BadInput where stages cannot be saved together, PeerLost."""
    directory = session.checkpoint.directory
    if directory is None:
        return Restored()
    found = resume.find(session, directory, snapshot.prepared)
    writes, writers = work_of(session, directory)
    if snapshot.part is not None:
        _refuse_apart(session, directory, writers)
        writes = snapshot.part.writes
    if found is None:
        saver.begin(writes=writes, writers=writers, step=0, on_disk=None)
        _report_resumed(session, "start", 0)
        return Restored()
    header, from_memory = found.checkpoint.header, found.generation is not None
    saver.begin(
        writes=writes,
        writers=writers,
        step=header.step,
        on_disk=None if from_memory else Moment(header.run, header.step),
    )
    if not from_memory:
        saver.store_received(found.checkpoint)
    resumed = Resumed(found.checkpoint, found.own)
    resumed.restore(model, optimizer, snapshot.prepared)
    loader.seek(resumed.position)
    exits.say(f"rank {session.place.rank} goes on from step {header.step}{', from memory' if from_memory else ''}")
    _compare_seed(session, header.seed, loader)
    _report_resumed(session, "memory" if from_memory else "disk", header.step)
    return Restored(header.step, resumed, found.generation)


def work_of(session: Session, directory: Path) -> tuple[bool, int]:
    """Return whether this rank writes ordinary checkpoints, and how many ranks write each one. Collective; raises
    PeerLost."""
    shared = resume.shares_directory_of_main(session.group, directory, session.run)
    writes = session.place.is_main or (session.place.local_rank == 0 and not shared)
    everywhere = session.group is not None and all(sees for (sees,) in session.group.gather_rows([shared]))
    return writes, session.place.world_size if everywhere else 1


def prepared(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loader: Loader[object],
    fingerprint: str,
    state: StateBytes,
) -> Prepared:
    """Return what the controller needs to know of the training."""
    return Prepared(
        entries=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        samples=loader.samples,
        batch_size=loader.own_batch,
        optimizer=family_of(optimizers),
        batches_per_update=1,
        fingerprint=fingerprint,
        shared_bytes=state.shared,
        own_bytes=state.own,
    )


def _refuse_apart(session: Session, directory: Path, writers: int) -> None:
    """Raises BadInput where not all stages' shards come together."""
    if session.checkpoint.store or writers < session.place.world_size:
        where = session.checkpoint.store or directory
        raise BadInput(
            f"checkpoints of a model in stages are written by all machines together, and {where} is no directory that "
            "they share. Give checkpoint.directory on a shared file system"
        )


def _report_resumed(session: Session, tier: str, step: int) -> None:
    if session.link is not None:
        session.link.outbox.resumed(tier, step)


def _compare_seed(session: Session, saved: int, loader: Loader[object]) -> None:
    if saved != session.seed and loader.position.consumed and session.place.is_main:
        text = (
            f"the checkpoint is of seed {saved}, this run has {session.seed}: samples of the epoch under way may come "
            "twice or not at all. Use the same seed to go on exactly"
        )
        session.notice(LEVEL_WARNING, text)
