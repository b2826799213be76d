"""Lists the checkpoints of a directory and checks that they are sound. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.agent.runtime.checkpoints.disk import manifest
from atoll.agent.runtime.checkpoints.disk.content import CHUNK_BYTES, Content, Hasher
from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors
from atoll.agent.runtime.checkpoints.disk.folders import by_age
from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.checkpoints.disk.manifest import MANIFEST_FILE, Manifest
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
