"""Checkpoints in a directory: DIRECTORY/step-000000100-run-000003/{state.safetensors, manifest.json}.

A checkpoint is written into a folder of another name, made durable, and renamed under the directory's lock once the
fence shows no newer run. So a folder with the right name is whole; the hashes in its manifest show later damage."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import torch

from atoll.agent.runtime.checkpoint import manifest, transfer
from atoll.agent.runtime.checkpoint.disk import disk_errors, free_bytes, sync_folder, write_all
from atoll.agent.runtime.checkpoint.fence import locked, raise_fence
from atoll.agent.runtime.checkpoint.header import Fingerprint, Header, check_fits, fingerprint
from atoll.agent.runtime.checkpoint.manifest import MANIFEST_FILE, STATE_FILE, Manifest
from atoll.agent.runtime.checkpoint.tensorfile import CHUNK_BYTES, Content, Hasher, deserialized, serialized
from atoll.agent.runtime.checkpoint.transfer import MAX_BYTES, Checkpoint
from atoll.errors import CheckpointError

__all__ = [
    "Candidate",
    "Checkpoint",
    "Fingerprint",
    "Header",
    "as_bytes",
    "check_fits",
    "fingerprint",
    "from_bytes",
    "keep_newest",
    "newest",
    "newest_valid",
    "read",
    "write",
]

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"step-(\d{9,})-run-(\d{6,})")
_WRITING: Final = ".writing-"
_REMOVING: Final = ".removing-"


@dataclass(frozen=True)
class Candidate:
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


def write(
    directory: Path,
    header: Header,
    tensors: Mapping[str, torch.Tensor],
    scalars: Any,
    *,
    as_run: int | None = None,
) -> Path:
    """Publish a checkpoint; when this returns it survives a power cut. A whole one of the same run and step stays.

    scalars: plain JSON (see pack_state). as_run: the run of who writes, where that is not header.run: a newer run may
    store an older one's checkpoint on its own machine. Raises CheckpointError if the writer's run was fenced by a
    newer one, or the disk refuses; what was written before is untouched."""
    writer_run = header.run if as_run is None else as_run
    final = directory / header.name
    with locked(directory):
        raise_fence(directory, writer_run)
        _sweep(directory)
        if _is_whole(final):
            return final
        with disk_errors(f"writing checkpoint {final}"):
            temporary, state = _begin(directory, header)
    try:
        try:
            with disk_errors(f"writing checkpoint {final} ({free_bytes(directory)} bytes free)"):
                _fill(temporary, state, header, tensors, scalars)
            with locked(directory):
                raise_fence(directory, writer_run)
                if not _is_whole(final):
                    with disk_errors(f"publishing checkpoint {final}"):
                        _discard(final)  # damaged, or it would be whole
                        temporary.rename(final)
                        sync_folder(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone if it was published; what stays is swept later
    finally:
        os.close(state)
    return final


def newest(directory: Path, on_skip: Callable[[str], None] = logger.warning) -> list[Candidate]:
    """All checkpoints with a sound manifest, the highest (run, step) first. Reads manifests only.

    on_skip is told of the others, with the reason."""
    candidates = []
    for path in _by_age(directory):
        try:
            found = _read_manifest(path)
            if found.header.name != path.name:
                raise CheckpointError(f"{path} holds {found.header.name}: somebody renamed it")
        except CheckpointError as error:
            on_skip(str(error))
        else:
            candidates.append(Candidate(path, found.header, found.state.bytes))
    return candidates


def read(path: Path) -> Checkpoint:
    """The checkpoint in this folder, every byte verified. Raises CheckpointError naming the file and what is wrong."""
    found = _read_manifest(path)
    file = path / STATE_FILE
    with disk_errors(f"reading {file}"), file.open("rb", buffering=0) as source:
        _check_size(file, os.fstat(source.fileno()).st_size, found)
        try:
            tensors, seen = deserialized(source, found.state.bytes)
        except CheckpointError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
    _check_content(file, found, seen)
    return Checkpoint(found.header, tensors, found.scalars, path)


def newest_valid(directory: Path, on_skip: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is sound; None where there is none. on_skip is told what was passed over and why."""
    candidates = newest(directory, on_skip)
    for candidate, older in zip_longest(candidates, candidates[1:]):
        try:
            return read(candidate.path)
        except CheckpointError as error:
            instead = "there is no older one" if older is None else f"{older.path.name} is tried in its place"
            on_skip(f"{error}; {instead}")
    return None


def keep_newest(directory: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints; the newest sound one stays in any case. Returns what went."""
    if keep < 1:
        raise CheckpointError(f"keep = {keep} would remove every checkpoint; it must be at least 1")
    with locked(directory):
        paths = _by_age(directory)
        if len(paths) <= keep:
            return []
        sound = next((path for path in paths if _is_sound(path)), None)
        surplus = [path for path in paths[keep:] if path != sound]
        with disk_errors(f"removing old checkpoints in {directory}"):
            for path in surplus:
                _discard(path)
    return surplus


def as_bytes(source: Path | Checkpoint, limit_bytes: int = MAX_BYTES) -> bytes:
    """A checkpoint for a peer: of a folder, then verified first, or of one in memory. Raises CheckpointError."""
    return transfer.pack(read(source) if isinstance(source, Path) else source, limit_bytes)


def from_bytes(data: bytes | bytearray | memoryview, limit_bytes: int = MAX_BYTES) -> Checkpoint:
    """What `as_bytes` made on another machine, every byte verified. Raises CheckpointError."""
    return transfer.unpack(data, limit_bytes)


def _begin(directory: Path, header: Header) -> tuple[Path, int]:
    """A folder to write in, and its state file, whose lock says that its writer lives. The directory is locked."""
    temporary = directory / f"{_WRITING}{header.name}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    state = os.open(temporary / STATE_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return temporary, state


def _fill(folder: Path, state: int, header: Header, tensors: Mapping[str, torch.Tensor], scalars: Any) -> None:
    hasher = Hasher()
    for part in serialized(tensors):
        write_all(state, part)
        hasher.update(part)
    os.fsync(state)
    sealed = manifest.to_bytes(Manifest(header, scalars, hasher.content()))
    with (folder / MANIFEST_FILE).open("xb") as file:
        file.write(sealed)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _by_age(directory: Path) -> list[Path]:
    """Folders that are named like checkpoints, the newest first."""
    if not directory.is_dir():
        return []
    with disk_errors(f"listing {directory}"):
        named = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, key=lambda one: (int(one[0][2]), int(one[0][1])), reverse=True)]


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST_FILE
    with disk_errors(f"reading {file}"), file.open("rb") as source:
        raw = source.read(manifest.MAX_MANIFEST_BYTES + 1)
    try:
        return manifest.from_bytes(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from error


def _check_size(file: Path, size: int, found: Manifest) -> None:
    if size != found.state.bytes:
        raise CheckpointError(f"{file} is torn: it has {size} bytes; {found.state.bytes} were written")


def _check_content(file: Path, found: Manifest, seen: Content) -> None:
    difference = found.state.difference(seen)
    if difference is not None:
        raise CheckpointError(f"{file} is damaged: {difference}")


def _is_whole(path: Path) -> bool:
    """Whether the folder is there with a sound manifest and a state file of the right size. Cheap."""
    try:
        found = _read_manifest(path)
        with disk_errors(f"looking at {path}"):
            _check_size(path / STATE_FILE, (path / STATE_FILE).stat().st_size, found)
    except CheckpointError:
        return False
    return True


def _is_sound(path: Path) -> bool:
    """Whether every byte is as it was written. Reads all of it."""
    file = path / STATE_FILE
    try:
        found = _read_manifest(path)
        hasher = Hasher()
        with disk_errors(f"reading {file}"):
            for part in _parts(file):
                hasher.update(part)
        _check_content(file, found, hasher.content())
    except CheckpointError as error:
        logger.warning("%s", error)
        return False
    return True


def _parts(file: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            yield buffer[:count]


def _discard(path: Path) -> None:
    """Remove a checkpoint such that a half-removed one has not its name any more. The directory is locked."""
    if path.exists():
        doomed = path.with_name(f"{_REMOVING}{path.name}-{secrets.token_hex(4)}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # what stays is swept later


def _sweep(directory: Path) -> None:
    """Remove what dead writers left. A live one holds the lock of its state file. The directory is locked."""
    with disk_errors(f"listing {directory}"):
        left = [path for path in directory.iterdir() if path.name.startswith((_WRITING, _REMOVING))]
    for path in left:
        if path.name.startswith(_REMOVING) or not _has_live_writer(path):
            shutil.rmtree(path, ignore_errors=True)  # not worth failing a checkpoint; the next one tries again


def _has_live_writer(temporary: Path) -> bool:
    try:
        state = os.open(temporary / STATE_FILE, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # made and locked under the directory's lock, which we hold
    except OSError:
        return True  # not ours to judge
    try:
        fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(state)
    return False
