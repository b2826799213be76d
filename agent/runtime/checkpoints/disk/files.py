"""Checkpoints in a directory: DIRECTORY/step-000000100-run-000003/{state.safetensors, manifest.json}. Ranks that all
reach it may write a shard each, of whole tensors, in place of the one state file.

A checkpoint is written into a folder of another name, made durable, and renamed under the directory's lock once the
fence shows no newer run. So a folder with the right name is whole; the hashes in its manifest show later damage.

Ranks write their shards into a folder that they share, and beside each what it holds. The last rank, who finds that all
are there, seals them with one manifest and publishes the folder. Nobody waits for anybody. Where a rank never comes,
the checkpoint never exists, and the folder is swept when a later one begins."""

from __future__ import annotations

import heapq
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import torch

from atoll.agent.runtime.agent_link.save_progress import progress
from atoll.agent.runtime.checkpoints.disk import manifest
from atoll.agent.runtime.checkpoints.disk.disk_errors import (
    disk_errors,
    free_bytes,
    replace_file,
    sync_folder,
    write_all,
)
from atoll.agent.runtime.checkpoints.disk.fence import locked, raise_fence
from atoll.agent.runtime.checkpoints.disk.folders import WRITER_FILE, Moment, begin, begin_shard, discard, sweep
from atoll.agent.runtime.checkpoints.disk.header import Header, fingerprint
from atoll.agent.runtime.checkpoints.disk.listing import (
    check_content,
    check_size,
    is_whole,
    newest,
    read_manifest,
)
from atoll.agent.runtime.checkpoints.disk.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    Content,
    Hasher,
    Manifest,
    shard_file,
)
from atoll.agent.runtime.checkpoints.disk.state import merged
from atoll.agent.runtime.checkpoints.disk.tensorfile import Readable, deserialized, serialized
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.errors import CheckpointError

SYNC_BYTES: Final = 64 << 20


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

    def fill(folder: Path) -> bytes:
        content = write_state(folder / STATE_FILE, serialized(tensors))
        return manifest.to_bytes(Manifest(header, scalars, {STATE_FILE: content}))

    return _publish(
        directory, Moment(header.run, header.step), (header.run, header.view) if as_run is None else (as_run, 1), fill
    )


def adopt(directory: Path, sealed: bytes, parts: Callable[[str], Iterator[memoryview]], as_run: int) -> Path:
    """Publish a checkpoint whose bytes come from elsewhere. sealed: its manifest; parts: of a state file, in order.

    Raises CheckpointError as `write` does, and where the parts are not what the manifest says."""
    found = manifest.from_bytes(sealed)

    def fill(folder: Path) -> bytes:
        for name, written in found.files.items():
            difference = written.difference(write_state(folder / name, parts(name)))
            if difference is not None:
                raise CheckpointError(f"{name} of {found.header.name} is damaged: {difference}")
        return sealed

    return _publish(directory, Moment(found.header.run, found.header.step), (as_run, 1), fill)


def _publish(directory: Path, moment: Moment, writer: tuple[int, int], fill: Callable[[Path], bytes]) -> Path:
    """writer: its run and view. fill: writes the state files into a folder and returns the manifest."""
    final = directory / moment.name
    with locked(directory):
        raise_fence(directory, *writer)
        sweep(directory, moment)
        if is_whole(final):
            return final
        with disk_errors(f"writing checkpoint {final}"):
            temporary, held = begin(directory, moment.name)
    try:
        try:
            with disk_errors(f"writing checkpoint {final} ({free_bytes(directory)} bytes free)"):
                write_sealed(temporary / MANIFEST_FILE, fill(temporary))
            with locked(directory):
                raise_fence(directory, *writer)
                publish(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone if it was published; what stays is swept later
    finally:
        os.close(held)
    return final


def publish(temporary: Path, final: Path) -> None:
    """Give a folder that is complete its name, unless a whole one has it. The directory is locked."""
    if is_whole(final):
        return
    with disk_errors(f"publishing checkpoint {final}"):
        for file in temporary.glob(f"{WRITER_FILE}*"):
            file.unlink(missing_ok=True)
        discard(final)  # damaged, or it would be whole
        temporary.rename(final)
        sync_folder(final.parent)


def write_state(file: Path, parts: Iterator[memoryview]) -> Content:
    """A new state file of these parts, durable. Raises OSError."""
    hasher = Hasher()
    with file.open("xb", buffering=0) as target:
        for part in _written(target.fileno(), parts):
            hasher.update(part)
        os.fsync(target.fileno())
    return hasher.content()


def _written(file: int, parts: Iterator[memoryview]) -> Iterator[memoryview]:
    """The parts, each when it is in the file. They become durable a piece at a time: who waits for them sees bytes
    move, and what is left to the last fsync is short."""
    unsynced = 0
    for part in parts:
        write_all(file, part)
        unsynced += len(part)
        if unsynced >= SYNC_BYTES:
            os.fdatasync(file)
            unsynced = 0
        progress.add(len(part))
        yield part


def write_sealed(file: Path, sealed: bytes) -> None:
    """A new file, durable with its name. Raises OSError."""
    with file.open("xb") as target:
        target.write(sealed)
        target.flush()
        os.fsync(target.fileno())
    sync_folder(file.parent)


def read(path: Path) -> LoadedCheckpoint:
    """The checkpoint in this folder, every byte verified. Raises CheckpointError naming the file and what is wrong."""

    @contextmanager
    def opened(name: str) -> Iterator[Readable]:
        file = path / name
        with disk_errors(f"reading {file}"), file.open("rb", buffering=0) as source:
            check_size(file, os.fstat(source.fileno()).st_size, found.files[name])
            yield source

    found = read_manifest(path)
    return replace(read_opened(found, opened, str(path)), path=path)


def read_opened(
    found: Manifest, opened: Callable[[str], AbstractContextManager[Readable]], where: str
) -> LoadedCheckpoint:
    """The checkpoint whose manifest is `found`, every byte verified. opened: a state file, by its name."""
    tensors: dict[str, torch.Tensor] = {}
    for name, written in found.files.items():
        file = f"{where}/{name}"
        with opened(name) as source:
            try:
                more, seen = deserialized(source, written.bytes)
            except CheckpointError as error:
                raise CheckpointError(f"{file} is damaged: {error}") from error
        check_content(Path(file), written, seen)
        if twice := tensors.keys() & more.keys():
            raise CheckpointError(f"{file} holds tensor {min(twice)}, as another of its files does")
        tensors.update(more)
    return LoadedCheckpoint(found.header, tensors, found.scalars)


def newest_valid(directory: Path, on_skip: Callable[[str], None]) -> LoadedCheckpoint | None:
    """The newest checkpoint that is sound; None where there is none. on_skip is told what was passed over and why."""
    candidates = newest(directory, on_skip)
    for candidate, older in zip_longest(candidates, candidates[1:]):
        try:
            return read(candidate.path)
        except CheckpointError as error:
            instead = "there is no older one" if older is None else f"{older.path.name} is tried in its place"
            on_skip(f"{error}; {instead}")
    return None


SHARD_BYTES: Final = 64 << 20
"""A shard has so much at least: of a smaller state, fewer ranks write."""
SMALL_BYTES: Final = 64 << 10
"""Smaller tensors are the first shard's: statistics of a model's norms, which ranks may have differently."""


@dataclass(frozen=True, slots=True)
class Share:
    """Part that one of `shards` ranks writes. layout: digest of all tensors' names, dtypes and shapes."""

    shard: int
    shards: int
    names: frozenset[str]
    layout: str


def shares(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[Share]:
    """Assign tensors to writers, about the same number of bytes each; the same for the same shapes. Pure."""
    count = max(1, min(ranks, sum(one.nbytes for one in tensors.values()) // SHARD_BYTES))
    names: list[set[str]] = [set() for _ in range(count)]
    filled = [(0, shard) for shard in range(count)]
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        if tensors[name].nbytes < SMALL_BYTES:
            names[0].add(name)
        else:
            taken, shard = heapq.heappop(filled)
            names[shard].add(name)
            heapq.heappush(filled, (taken + tensors[name].nbytes, shard))
    layout = fingerprint(tensors).digest
    return [Share(shard, count, frozenset(each), layout) for shard, each in enumerate(names)]


def write_shard(
    directory: Path, header: Header, share: Share, tensors: Mapping[str, torch.Tensor], scalars: Any
) -> Path | None:
    """Write one shard, durable; the only one as `write` does. Returns the checkpoint's path where this was the last one
    and published it.

    tensors: those of the share. scalars: as `pack_state` gave them; where shards are of different parts of a model,
    each has its own, and they are put together. None: the first shard's are of all. Raises CheckpointError if this run
    was fenced by a newer one, the disk refuses, or the shards are of different states."""
    if share.shards == 1:
        return write(directory, header, tensors, scalars)
    final, moment = directory / header.name, Moment(header.run, header.step)
    with locked(directory):
        raise_fence(directory, header.run, header.view)
        sweep(directory, moment)
        if is_whole(final):
            return None
        with disk_errors(f"writing checkpoint {final}"):
            folder, held = begin_shard(directory, moment, share.shard)
    try:
        with disk_errors(f"writing checkpoint {final} ({free_bytes(directory)} bytes free)"):
            if _part_of(folder, share.shard).exists():
                return None  # by a rank that has the same
            name = shard_file(share.shard, share.shards)
            (folder / name).unlink(missing_ok=True)  # of one that died in the middle
            content = write_state(folder / name, serialized(tensors))
            body = {"layout": share.layout, "state": manifest.content_to_json(name, content)}
            if share.shard == 0:
                body |= {"header": header.to_json()}
            if scalars is not None:
                body |= {"scalars": scalars}
            replace_file(_part_of(folder, share.shard), manifest.sealed(body))  # whole as soon as others see it
        with locked(directory):
            raise_fence(directory, header.run, header.view)
            with disk_errors(f"publishing checkpoint {final}"):
                return _publish_if_last(folder, final, share)
    finally:
        os.close(held)


def _publish_if_last(folder: Path, final: Path, share: Share) -> Path | None:
    parts = [_part_of(folder, shard) for shard in range(share.shards)]
    if not all(part.exists() for part in parts):
        return None
    found = [manifest.unsealed(part.read_bytes()) for part in parts]
    if any(one["layout"] != share.layout for one in found):
        raise CheckpointError(f"the ranks' shards of {final.name} are of different tensors")
    files = dict(manifest.content_from_json(one["state"]) for one in found)
    scalars = merged([one["scalars"] for one in found if "scalars" in one])
    whole = Manifest(Header.from_json(found[0]["header"]), scalars, files)
    write_sealed(folder / MANIFEST_FILE, manifest.to_bytes(whole))
    for part in parts:
        part.unlink()
    publish(folder, final)
    return final


def _part_of(folder: Path, shard: int) -> Path:
    return folder / f".shard-{shard}.json"
