"""Restores the newest checkpoint at a run's start: into model, optimizer and loader, on every rank alike."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import nn

from atoll.agent.runtime.agent_link import exits
from atoll.agent.runtime.checkpoints.disk import fence, files, listing
from atoll.agent.runtime.checkpoints.disk.folders import Moment
from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header, check_fits
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.agent.runtime.checkpoints.disk.tensorfile import bytes_of
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint, transfer_checkpoint
from atoll.agent.runtime.checkpoints.memory.cost.state_size import StateBytes
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import HeldGenerations, Recovered
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation
from atoll.agent.runtime.checkpoints.remote_checkpoints import RemoteCheckpoints
from atoll.agent.runtime.checkpoints.saver import Saver
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.as_one import OptimizerState, load_state
from atoll.agent.runtime.model.durable import Origin, OwnState
from atoll.agent.runtime.model.model_state import load_module
from atoll.agent.runtime.model.snapshot import SHARED, Snapshot, Tracked
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import BadInput, CheckpointError
from atoll.strategies import registry
from atoll.telemetry.telemetry_limits import ADAPTIVE, SGD
from atoll.v1.agents_pb2 import Prepared
from atoll.v1.agents_pb2 import Resumed as ResumedReport
from atoll.v1.common_pb2 import LEVEL_WARNING

_NONE = (-1, -1, -1, -1, -1)
_NOTHING = (-1, -1)


class Resumed:
    """A checkpoint on its way back into the objects that it was taken from."""

    def __init__(self, checkpoint: LoadedCheckpoint, own: Sequence[OwnState] | None = None) -> None:
        """own: what this rank takes over of the run before; None: it is beside the checkpoint."""
        self._where = f"the checkpoint of run {checkpoint.header.run}, step {checkpoint.header.step}"
        self._header = header = checkpoint.header
        self._strategy = header.strategy  # empty: written by an older version
        self.position = position_of(header)
        self._states, self._own = unpack_state(checkpoint.tensors, checkpoint.scalars), own

    def restore(self, model: nn.Module, optimizer: OptimizerState, prepared: Fingerprint) -> None:
        """Overwrite the state of both. prepared: the whole model as run.prepare got it; buffers may have another shape
        by now. Raises CheckpointError where the state is that of another one."""
        check_fits(self._header, prepared)
        with self._another("the model"):
            load_module(model, self._states.pop("model"))
        saved = self._states.pop("optimizer")
        sizes = [[len(group["params"]) for group in one] for one in (saved["param_groups"], optimizer.param_groups)]
        with self._another(f"the optimizer (groups of {sizes[0]} parameters, where this one has {sizes[1]})"):
            load_state(optimizer, saved)

    def restore_tracked(self, name: str, tracked: Tracked) -> None:
        """Raises CheckpointError where the checkpoint has no such state or the object refuses it."""
        state = self._states.pop(f"tracked.{name}", None)
        if state is None:
            raise CheckpointError(f"{self._where} has no state of {name!r}; it begins anew")
        with self._another(name):
            tracked.load_state_dict(state)

    def origin(self, session: Session) -> Origin | None:
        """Return the origin for a Durable of the session's strategy; None if the checkpoint's strategy keeps state of
        another kind beside model and optimizer, which means nothing to this one."""
        header, own, before = self._header, registry.of(session.strategy), registry.strategies().get(self._strategy)
        shared = self._states.pop(SHARED, {})
        if before is not None and before.kept_state != own.kept_state:
            if before.kept_state and session.place.is_main:
                text = f"{self._where} is by strategy {before.name}, and this run trains by {own.name}"
                session.notice(LEVEL_WARNING, f"{text}: what a worker had not sent by then does not count")
            return None
        return Origin(header.run, header.view, header.step, header.world_size, shared, self._own)

    @contextmanager
    def _another(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._where} does not fit {what} of this script: {error}. Choose another checkpoint directory, or "
                "give the job another name"
            ) from error


def position_of(header: Header) -> Position:
    """Position from which training continues."""
    return Position(header.epoch, header.consumed, header.loader_step, header.samples)


def find(session: Session, directory: Path, model: Fingerprint) -> Recovered | None:
    """The newest checkpoint that any rank holds on disk, or all together in memory; the same on every rank.

    Where memory has a newer one, disks are not read at all. Raises CheckpointError if a newer run holds the directory,
    PeerLost."""
    directory.mkdir(parents=True, exist_ok=True)
    fence.take(directory, session.run)
    remote = RemoteCheckpoints(session, directory)
    remembered: HeldGenerations | None = None
    if session.memory is not None:
        remembered = HeldGenerations(session, session.memory.folders, model, newest_run=session.run - 1)
    if remembered is not None:
        newest = _newest_on_disk(session, directory, remote)
        remembered.bring(newest)
        if (found := remembered.newest(newest)) is not None:
            return found
    remote.bring(lambda: _newest_on_disk(session, directory))
    on_disk = _find_on_disk(session, directory)
    if remembered is not None:  # disks may have said that they had more than is sound
        newer_than = _NOTHING if on_disk is None else (on_disk.header.run, on_disk.header.step)
        if (found := remembered.newest(newer_than)) is not None:
            return found
    on_disk = on_disk or agreed(session, remote.start())
    return Recovered(on_disk) if on_disk is not None else None


def _newest_on_disk(session: Session, directory: Path, remote: RemoteCheckpoints | None = None) -> tuple[int, int]:
    """(run, step) of the newest checkpoint whose manifest is sound, on any rank's disk, or `remote`."""
    own = next(((one.run, one.step) for one in listing.newest(directory, lambda why: None)), _NOTHING)
    own = max(own, remote.newest_in_store or _NOTHING) if remote is not None else own
    if session.group is None:
        return own
    return max((run, step) for run, step in session.group.gather_rows(own))


def _find_on_disk(session: Session, directory: Path) -> LoadedCheckpoint | None:
    """The newest sound one on any rank's disk, on every rank. Raises PeerLost."""
    rank = session.place.rank
    own = files.newest_valid(
        directory, lambda why: session.notice(LEVEL_WARNING, f"rank {rank} skips a checkpoint: {why}")
    )
    return agreed(session, own)


def agreed(session: Session, own: LoadedCheckpoint | None) -> LoadedCheckpoint | None:
    """The newest of what the ranks have, on every rank; None where none has any. Raises PeerLost.

    Highest (run, step) wins, then the later position: one rank may have saved a step at its epoch's end, another where
    the next epoch begins. Of the same position ranks that were lost apart may have saved different states, where the
    strategy is not synchronous: then that of the lowest rank is everybody's. Who lacks it receives it from the lowest
    rank that has it, and verifies it on arrival."""
    if session.group is None:
        return own
    mine = _NONE
    if own is not None:
        mine = (own.header.run, own.header.step, own.header.epoch, own.header.consumed, _contained(own))
    positions = [tuple(row) for row in session.group.gather_rows(mine)]
    source = max(range(len(positions)), key=lambda one: (positions[one][:-1], -one))
    best = positions[source]
    if best == _NONE:
        return None
    if all(one == best for one in positions):
        return own
    lacking = [rank for rank, position in enumerate(positions) if position != best]
    return transfer_checkpoint(session.group, own, source, lacking) or own


def _contained(checkpoint: LoadedCheckpoint) -> int:
    """Equal for equal states of one position: a digest, below 2^63, of what is beside model and optimizer."""
    hasher = xxhash.xxh3_64()
    for name in sorted(name for name in checkpoint.tensors if name.startswith(f"{SHARED}/")):
        hasher.update(bytes_of(checkpoint.tensors[name]))
    return hasher.intdigest() >> 1


def shares_directory_of_main(group: Group | None, directory: Path, run: int) -> bool:
    """Return whether this rank's directory is rank 0's: rank 0 puts a token there, the others look for it."""
    if group is None:
        return True
    file = directory / f".token-run-{run}"
    token = group.broadcast_bytes(secrets.token_bytes(16) if group.rank == 0 else None, 0)
    try:
        if group.rank == 0:
            file.write_bytes(token)
        group.barrier()
        sees = file.is_file() and file.read_bytes() == token
        group.barrier()
    finally:
        if group.rank == 0:
            file.unlink(missing_ok=True)
    return sees


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
    found = find(session, directory, snapshot.prepared)
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
    exits.say(f"rank {session.place.rank} resumes from step {header.step}{', from memory' if from_memory else ''}")
    _compare_seed(session, header.seed, loader)
    _report_resumed(session, "memory" if from_memory else "disk", header.step)
    return Restored(header.step, resumed, found.generation)


def work_of(session: Session, directory: Path) -> tuple[bool, int]:
    """Return whether this rank writes ordinary checkpoints, and how many ranks write each one. Collective; raises
    PeerLost."""
    shared = shares_directory_of_main(session.group, directory, session.run)
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
        session.link.outbox.add(resumed=ResumedReport(tier=tier, step=step))


def _compare_seed(session: Session, saved: int, loader: Loader[object]) -> None:
    if saved != session.seed and loader.position.consumed and session.place.is_main:
        text = (
            f"the checkpoint is of seed {saved}, this run has {session.seed}: samples of the epoch under way may come "
            "twice or not at all. Use the same seed to go on exactly"
        )
        session.notice(LEVEL_WARNING, text)


def family_of(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return SGD where each update is a linear function of the gradients, else ADAPTIVE.

    Adam, Adagrad, RMSprop, Lion, Muon and others divide by the gradient's size in one way or another. Whatever is
    derived from an SGD, or called one, is linear."""
    linear = all(any("SGD" in one.__name__ for one in type(optimizer).__mro__) for optimizer in optimizers)
    return SGD if linear else ADAPTIVE
