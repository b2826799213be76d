"""The files of one job in its agent's memory folder: shard-0002-of-0004-slot-1.mem.

Two slots for each shard: the last complete generation, and the one that is being written. Which is which is said in
the files themselves; names tell only the place, so that the next run writes where the last one did."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors
from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header, check_fits
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Shard, SlotFile, Unsealed
from atoll.errors import CheckpointError

SLOTS: Final = 2
MAX_FILES: Final = 4096
_NAME: Final = re.compile(r"shard-(\d{4})-of-(\d{4})-slot-([01])\.mem")


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """What all shards of one moment have in common; a higher one is newer."""

    run: int
    step: int
    shards: int
    layout: str  # digest

    @staticmethod
    def of(shard: Shard) -> Generation:
        return Generation(shard.header.run, shard.header.step, shard.tail.shards, shard.layout_digest)


@dataclass(frozen=True, slots=True)
class WholeShard:
    """A shard that is here, whole."""

    generation: Generation
    shard: int
    path: Path

    @property
    def slot(self) -> int:
        return int(self.path.stem[-1])


def paths(folder: Path) -> list[Path]:
    """Files of shards, in a fixed order."""
    if not folder.is_dir():
        return []
    with disk_errors(f"listing {folder}"):
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))[:MAX_FILES]


def place_of(path: Path) -> tuple[int, int]:
    """(shard, shards) as the name of a file of a shard says."""
    match = _NAME.fullmatch(path.name)
    assert match is not None  # `paths` gave it
    return int(match[1]), int(match[2])


def file_name(shard: int, shards: int, slot: int) -> str:
    return f"shard-{shard:04d}-of-{shards:04d}-slot-{slot}.mem"


@dataclass(frozen=True, slots=True)
class Resumable:
    """What a run can go on from: shards of its own job and model that earlier runs wrote."""

    job: str
    run: int
    model: Fingerprint

    def check(self, header: Header) -> None:
        """Raises CheckpointError."""
        if header.job != self.job:
            raise CheckpointError(f"it is of job {header.job!r}, not of {self.job!r}")
        if header.run >= self.run:
            raise CheckpointError(f"it is of run {header.run}; this is run {self.run}")
        check_fits(header, self.model)


def whole_shards(
    folder: Path, wanted: Resumable, part: tuple[int, int], on_skip: Callable[[str], None]
) -> list[WholeShard]:
    """Whole shards that are wanted, every byte verified. part: (i, n): every n-th file from the i-th on, for who looks
    together with others. on_skip is told of files that cannot be used, and why."""
    found = []
    for path in paths(folder)[part[0] :: part[1]]:
        try:
            shard = shard_file.parse(shard_file.content_of(path))
            wanted.check(shard.header)
        except CheckpointError as error:
            if not isinstance(error, Unsealed):
                on_skip(f"{path.name}: {error}")
        else:
            found.append(WholeShard(Generation.of(shard), shard.tail.shard, path))
    return found


class ShardFiles:
    """The two slots of one shard, for its writer."""

    def __init__(
        self, folder: Path, shard: int, shards: int, restored: Generation | None, make_room: Callable[[], bool]
    ) -> None:
        """restored: what this run began with; a slot that holds it is overwritten last. make_room: as for SlotFile."""
        self._make_room = make_room
        self._paths = [folder / file_name(shard, shards, index) for index in range(SLOTS)]
        self._files: list[SlotFile | None] = [None] * SLOTS
        self._next = 0
        if restored is not None and self._paths[0].exists():
            try:
                self._next = int(Generation.of(shard_file.parse(shard_file.content_of(self._paths[0]))) == restored)
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


class CopyFiles:
    """The two slots of another rank's shard, for who holds its copy."""

    def __init__(self, files: ShardFiles) -> None:
        self._files = files
        self._file: SlotFile | None = None

    def begin(self, total: int, *, turn: bool) -> None:
        """A new copy of `total` bytes comes. turn: the one before is complete, and stays. Raises CheckpointError."""
        if turn:
            self._files.turn()
        self._file = self._files.next()
        self._file.receive(total)

    def put(self, part: memoryview, place: int) -> None:
        assert self._file is not None  # begin came first
        self._file.put(part, place)

    def close(self) -> None:
        self._files.close()


def remove_others(folder: Path, kept: Collection[int], shards: int) -> None:
    """Remove all but the shards `kept` of `shards`. Raises CheckpointError."""
    with disk_errors(f"removing old shards in {folder}"):
        for path in paths(folder):
            match = _NAME.fullmatch(path.name)
            if match is None or int(match[2]) != shards or int(match[1]) not in kept:
                path.unlink(missing_ok=True)
