"""Lists the checkpoints of a directory, checks that they are sound, and chooses those that stay. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from atoll.agent.runtime.checkpoints.disk import manifest
from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors
from atoll.agent.runtime.checkpoints.disk.fence import locked
from atoll.agent.runtime.checkpoints.disk.folders import Moment, by_age, discard
from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.checkpoints.disk.manifest import CHUNK_BYTES, MANIFEST_FILE, Content, Hasher, Manifest
from atoll.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint whose manifest is sound; its state was not looked at yet."""

    path: Path
    header: Header
    state_bytes: int

    @property
    def run(self) -> int:
        return self.header.run

    @property
    def step(self) -> int:
        return self.header.step


def newest(directory: Path, on_skip: Callable[[str], None] = logger.warning) -> list[CheckpointFolder]:
    """All checkpoints with a sound manifest, the highest (run, step) first. Reads manifests only.

    on_skip is told of the others, with the reason."""
    candidates = []
    for path in by_age(directory).values():
        try:
            found = read_manifest(path)
            if found.header.name != path.name:
                raise CheckpointError(f"{path} holds {found.header.name}: somebody renamed it")
        except CheckpointError as error:
            on_skip(str(error))
        else:
            candidates.append(CheckpointFolder(path, found.header, found.state_bytes))
    return candidates


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in this folder. Raises CheckpointError naming the file and what is
    wrong."""
    file = path / MANIFEST_FILE
    with disk_errors(f"reading {file}"), file.open("rb") as source:
        raw = source.read(manifest.MAX_MANIFEST_BYTES + 1)
    try:
        return manifest.from_bytes(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from error


def check_size(file: Path, size: int, written: Content) -> None:
    if size != written.bytes:
        raise CheckpointError(f"{file} is torn: it has {size} bytes; {written.bytes} were written")


def check_content(file: Path, written: Content, seen: Content) -> None:
    difference = written.difference(seen)
    if difference is not None:
        raise CheckpointError(f"{file} is damaged: {difference}")


def check_whole(path: Path) -> Manifest:
    """Check cheaply that the manifest is sound and state files have the right sizes. Raises CheckpointError."""
    found = read_manifest(path)
    for name, written in found.files.items():
        with disk_errors(f"looking at {path / name}"):
            check_size(path / name, (path / name).stat().st_size, written)
    return found


def check_sound(path: Path) -> Manifest:
    """Every byte is as it was written. Reads all of it. Raises CheckpointError naming file and place."""
    found = read_manifest(path)
    for name, written in found.files.items():
        file, hasher = path / name, Hasher()
        with disk_errors(f"reading {file}"):
            for part in parts(file):
                hasher.update(part)
        check_size(file, hasher.content().bytes, written)
        check_content(file, written, hasher.content())
    return found


def is_whole(path: Path) -> bool:
    try:
        check_whole(path)
    except CheckpointError:
        return False
    return True


def is_sound(path: Path) -> bool:
    try:
        check_sound(path)
    except CheckpointError as error:
        logger.warning("%s", error)
        return False
    return True


def parts(file: Path) -> Iterator[memoryview]:
    """A file's bytes, CHUNK_BYTES at a time, each valid until the next. Raises OSError."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            yield buffer[:count]


def retained(present: Collection[Moment], keep: int, keep_every_steps: int = 0) -> set[Moment]:
    """Return the checkpoints that stay: the newest `keep`, and the first at or after each multiple of keep_every_steps.

    With gradient accumulation a checkpoint may come a little after the multiple, so the exact step is not required. Of
    equal steps the newest run's counts: training continued from it. keep_every_steps: 0 keeps none for good."""
    if keep < 1:
        raise CheckpointError(f"keep = {keep} would remove every checkpoint; it must be at least 1")
    stay = set(sorted(present, reverse=True)[:keep])
    if keep_every_steps:
        firsts: dict[int, Moment] = {}
        for moment in sorted(present, key=lambda one: (one.step, -one.run)):
            if moment.step >= keep_every_steps:
                firsts.setdefault(moment.step // keep_every_steps, moment)
        stay.update(firsts.values())
    return stay


def keep_newest(
    directory: Path,
    keep: int,
    keep_every_steps: int = 0,
    in_use: Set[Moment] = frozenset(),
    sound: Moment | None = None,
) -> list[Path]:
    """Remove what `retained` does not name; the newest sound one stays in any case, and what is in use. Returns what
    went.

    sound: one that the caller has just written, so that none needs to be read. Else the newest are read until one is
    sound; others may use the directory meanwhile."""
    present = by_age(directory)
    if not present.keys() - retained(present, keep, keep_every_steps) - in_use:
        return []
    if sound not in present:
        sound = next((moment for moment, path in present.items() if is_sound(path)), None)
    stay = in_use | ({sound} if sound is not None else set())
    with locked(directory):
        present = by_age(directory)
        stay = stay | retained(present, keep, keep_every_steps)
        surplus = [path for moment, path in present.items() if moment not in stay]
        with disk_errors(f"removing old checkpoints in {directory}"):
            for path in surplus:
                discard(path)
    return surplus
