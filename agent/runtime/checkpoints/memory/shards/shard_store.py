"""The whole shards of a job that lie on this machine, and the files that the next ones are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header, check_fits
from atoll.agent.runtime.checkpoints.disk.shard_folders import ALL_SLOTS, MAX_FILES, SLOTS, ShardFolders, place_of
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Shard, SlotFile, Unsealed
from atoll.errors import CheckpointError
from atoll.v1.worker_pb2 import ShardReply


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """Identity that all shards of one moment share; a higher one is newer."""

    run: int
    step: int
    shards: int
    layout: str  # digest

    @staticmethod
    def of(shard: Shard) -> Generation:
        return Generation(shard.header.run, shard.header.step, shard.tail.shards, shard.layout_digest)


@dataclass(frozen=True, slots=True)
class HeldShard:
    """Whole shard that a rank or an agent holds. bytes: those that count, where an agent named it. holder: of an agent,
    its number among those that the launch names."""

    generation: Generation
    shard: int
    slot: int
    bytes: int = 0
    holder: int = 0


def encode(held: Iterable[HeldShard]) -> bytes:
    """Encode the shards that this rank holds, for the others."""
    rows = [
        ShardReply.Held(
            run=one.generation.run,
            step=one.generation.step,
            shard=one.shard,
            shards=one.generation.shards,
            slot=one.slot,
            layout=one.generation.layout,
            bytes=one.bytes,
        )
        for one in held
    ]
    return ShardReply(held=rows[:MAX_FILES]).SerializeToString()


def decode(raw: bytes, holder: int = 0) -> list[HeldShard]:
    """Decode what `encode` gave on another rank. Raises CheckpointError."""
    try:
        return listed(ShardReply.FromString(raw), holder)
    except DecodeError as error:
        raise CheckpointError(f"{len(raw)} bytes cannot be read: {error}") from error


def listed(reply: ShardReply, holder: int = 0) -> list[HeldShard]:
    """Return the shards that a rank or an agent says it holds. Raises CheckpointError for nonsense."""
    if len(reply.held) > MAX_FILES:
        raise CheckpointError(f"it lists {len(reply.held)} shards; at most {MAX_FILES} are taken")
    found = []
    for row in reply.held:
        if not row.shard < row.shards or row.slot >= ALL_SLOTS or max(row.run, row.step, row.bytes) >= 2**63:
            raise CheckpointError(f"{str(row)!r:.200} is no shard")
        generation = Generation(row.run, row.step, row.shards, row.layout)
        found.append(HeldShard(generation, row.shard, row.slot, row.bytes, holder))
    return found


@dataclass(frozen=True, slots=True)
class Resumable:
    """Criteria for shards that a run can continue from: of its own job and model, by earlier runs or by an earlier
    view."""

    job: str
    newest_run: int
    model: Fingerprint

    def check(self, header: Header) -> None:
        """Raises CheckpointError."""
        if header.job != self.job:
            raise CheckpointError(f"it is of job {header.job!r}, not of {self.job!r}")
        if header.run > self.newest_run:
            raise CheckpointError(f"it is of run {header.run}; run {self.newest_run} is the newest that counts")
        check_fits(header, self.model)


def whole_shards(
    folders: ShardFolders, wanted: Resumable, part: tuple[int, int], on_skip: Callable[[str], None]
) -> list[HeldShard]:
    """Whole shards that are wanted, every byte verified. part: (i, n): every n-th file from the i-th on, for who looks
    together with others. on_skip is told of files that cannot be used, and why."""
    found = []
    for path in folders.paths()[part[0] :: part[1]]:
        try:
            shard = shard_file.parse(shard_file.content_of(path))
            wanted.check(shard.header)
        except CheckpointError as error:
            if not isinstance(error, Unsealed):
                on_skip(f"{path.name}: {error}")
        else:
            found.append(HeldShard(Generation.of(shard), shard.tail.shard, place_of(path)[2]))
    return found


class ShardFiles:
    """The two slots of one shard, for its writer."""

    def __init__(self, slots: Sequence[Path], newest: tuple[int, int] | None, make_room: Callable[[], bool]) -> None:
        """slots: their paths. newest: run and step of the generation that is whole; a slot that holds its shard is
        overwritten last. make_room: as for SlotFile."""
        self._make_room = make_room
        self._paths = slots
        self._files: list[SlotFile | None] = [None] * SLOTS
        self._next = 0
        if newest is not None and self._paths[0].exists():
            try:
                header = shard_file.parse(shard_file.content_of(self._paths[0])).header
                self._next = int((header.run, header.step) == newest)
            except CheckpointError:
                self._next = 0  # torn: nothing to spare

    def next(self) -> SlotFile:
        """The slot that does not hold the last generation. Raises CheckpointError."""
        file = self._files[self._next]
        if file is None:
            file = self._files[self._next] = SlotFile(self._paths[self._next], self._make_room)
        return file

    def turn(self) -> None:
        """The generation in `next` is complete on every rank: the other slot is next."""
        self._next = 1 - self._next

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                file.close()
