"""The places of a job's shards on one machine: shard-0002-of-0004-slot-1.mem.

Two slots for each shard: the last complete generation, and the one that is being written. Which is which is said in
the files themselves; names tell only the place, so that the next run writes where the last one did. A shard for which
memory has no room lies on the machine's disk, in slots 2 and 3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors

SLOTS: Final = 2
ALL_SLOTS: Final = 2 * SLOTS
MAX_FILES: Final = 4096
_NAME: Final = re.compile(r"shard-(\d{4})-of-(\d{4})-slot-([0-3])\.mem")


@dataclass(frozen=True, slots=True)
class ShardFolders:
    """Folders of one job and agent. memory, disk: None where there is none."""

    memory: Path | None
    disk: Path | None = None

    def paths(self) -> list[Path]:
        """Files of shards, in a fixed order. Raises CheckpointError."""
        found: list[Path] = []
        for folder in dict.fromkeys((self.memory, self.disk)):
            if folder is not None and folder.is_dir():
                with disk_errors(f"listing {folder}"):
                    found += [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name)[:MAX_FILES]

    def path(self, shard: int, shards: int, slot: int) -> Path | None:
        """Return the shard's path if its slot's folder is there."""
        folder = self.memory if slot < SLOTS else self.disk
        return None if folder is None else folder / file_name(shard, shards, slot)

    def slots(self, shard: int, shards: int, *, on_disk: bool) -> list[Path]:
        """The two of one shard; the folder is there when this returns. Raises CheckpointError."""
        first = SLOTS if on_disk else 0
        found = [self.path(shard, shards, slot) for slot in range(first, first + SLOTS)]
        paths = [path for path in found if path is not None]
        assert len(paths) == SLOTS  # who asks has looked for room there
        if on_disk:
            with disk_errors(f"making {paths[0].parent}"):
                paths[0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return paths

    def remove_others(self, kept: Mapping[int, bool], shards: int) -> None:
        """Remove all but the shards `kept` of `shards`, by shard whether it is the one on disk. Raises
        CheckpointError."""
        for path in self.paths():
            shard, of, slot = place_of(path)
            if of != shards or kept.get(shard) is not (slot >= SLOTS):
                with disk_errors(f"removing {path}"):
                    path.unlink(missing_ok=True)


def file_name(shard: int, shards: int, slot: int) -> str:
    return f"shard-{shard:04d}-of-{shards:04d}-slot-{slot}.mem"


def place_of(path: Path) -> tuple[int, int, int]:
    """(shard, shards, slot) as the name of a file of a shard says."""
    match = _NAME.fullmatch(path.name)
    assert match is not None  # `paths` gave it
    shard, shards, slot = map(int, match.groups())
    return shard, shards, slot
