"""A checkpoint as one string of bytes, for a peer whose machine lacks it. Verified on arrival; no code in it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from atoll.agent.runtime.checkpoints.disk import manifest
from atoll.agent.runtime.checkpoints.disk.content import Hasher
from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.checkpoints.disk.manifest import STATE_FILE, Manifest
from atoll.agent.runtime.checkpoints.disk.tensorfile import deserialized, serialized
from atoll.errors import CheckpointError

MAX_BYTES: Final = 64 << 30
_MAGIC: Final = b"ATOLLCP1"
_PREFIX_BYTES: Final = len(_MAGIC) + 8


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A whole, verified checkpoint in memory. `path` is the folder that it was read from, None for one from a peer."""

    header: Header
    tensors: Mapping[str, torch.Tensor]
    scalars: Any
    path: Path | None = None


def pack(checkpoint: LoadedCheckpoint, limit_bytes: int = MAX_BYTES) -> bytes:
    """Magic, length of the manifest (8 bytes, little endian), manifest, state file."""
    hasher, parts = Hasher(), []
    for part in serialized(checkpoint.tensors):
        hasher.update(part)
        parts.append(part)
    head = manifest.to_bytes(Manifest(checkpoint.header, checkpoint.scalars, {STATE_FILE: hasher.content()}))
    size = _PREFIX_BYTES + len(head) + hasher.content().bytes
    if size > limit_bytes:
        raise CheckpointError(f"checkpoint {checkpoint.header.name} takes {size} bytes; at most {limit_bytes} are sent")
    return b"".join([_MAGIC, len(head).to_bytes(8, "little"), head, *parts])


def unpack(data: bytes | bytearray | memoryview, limit_bytes: int = MAX_BYTES) -> LoadedCheckpoint:
    """Raises CheckpointError where `data` is over the limit, torn, damaged or something else."""
    view = memoryview(data).cast("B")
    if len(view) > limit_bytes:
        raise CheckpointError(f"a peer sent {len(view)} bytes as a checkpoint; at most {limit_bytes} are taken")
    if len(view) < _PREFIX_BYTES or bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise CheckpointError(f"the {len(view)} bytes from a peer are not a checkpoint: their first 8 are wrong")
    end = _PREFIX_BYTES + int.from_bytes(view[len(_MAGIC) : _PREFIX_BYTES], "little")
    if end > len(view) or end - _PREFIX_BYTES > manifest.MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest of a checkpoint from a peer ends at byte {end}, over its {len(view)} or the limit"
        )
    try:
        found = manifest.from_bytes(bytes(view[_PREFIX_BYTES:end]))
        if len(view) - end != found.state_bytes or list(found.files) != [STATE_FILE]:
            raise CheckpointError(f"its state has {len(view) - end} bytes; {found.state_bytes} were written")
        tensors, seen = deserialized(io.BytesIO(view[end:]), found.state_bytes)
        difference = found.files[STATE_FILE].difference(seen)
        if difference is not None:
            raise CheckpointError(f"of its state, {difference}")
    except CheckpointError as error:
        raise CheckpointError(f"a checkpoint from a peer was damaged on the way: {error}") from error
    return LoadedCheckpoint(found.header, tensors, found.scalars)
