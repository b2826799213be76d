"""The manifest: header, scalars and what the state files must hold. A checkpoint without a sound one does not exist."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from atoll.agent.runtime.checkpoints.disk.content import CHUNK_BYTES, Content
from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.errors import CheckpointError

STATE_FILE: Final = "state.safetensors"
MANIFEST_FILE: Final = "manifest.json"
MAX_MANIFEST_BYTES: Final = 64 << 20
_SEAL: Final = b', "xxh3_128": "%s"}\n'
_SEAL_BYTES: Final = len(_SEAL % bytes(32))


_SHARD: Final = re.compile(r"state-(\d{5})-of-(\d{5})\.safetensors")


def shard_file(shard: int, shards: int) -> str:
    """The state file of one of `shards` shards, counted from 1, as other tools name those of large models."""
    return f"state-{shard + 1:05d}-of-{shards:05d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """files: the content of each state file, by its name: STATE_FILE alone, or all of `shard_file`."""

    header: Header
    scalars: Any
    files: Mapping[str, Content]

    @property
    def state_bytes(self) -> int:
        return sum(content.bytes for content in self.files.values())


def has_all(names: Collection[str]) -> bool:
    """Return whether a folder with these file names may hold a whole checkpoint."""
    if MANIFEST_FILE not in names:
        return False
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    return STATE_FILE in names or (bool(shards) and len(shards) == int(shards[0][2]))


def to_bytes(manifest: Manifest) -> bytes:
    """JSON whose last member is the hash of every byte before it, so that any flipped bit shows."""
    states = [content_to_json(name, content) for name, content in manifest.files.items()]
    body = {
        "header": manifest.header.to_json(),
        "state": states[0] if len(states) == 1 else states,  # one file: as the first release wrote it
        "scalars": manifest.scalars,
    }
    return sealed(body)


def sealed(body: Mapping[str, Any]) -> bytes:
    """JSON whose last member is the hash of every byte before it. Raises CheckpointError."""
    try:
        text = json.dumps(body, allow_nan=False).encode()[:-1]
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the scalars of a checkpoint must be plain JSON: {error}. Use pack_state") from error
    raw = text + _SEAL % xxhash.xxh3_128_hexdigest(text).encode()
    if len(raw) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the state's numbers and names take {len(raw)} bytes, over {MAX_MANIFEST_BYTES}. Make tensors of lists"
        )
    return raw


def from_bytes(raw: bytes) -> Manifest:
    """Raises CheckpointError saying what is wrong with these bytes."""
    body = unsealed(raw)
    try:
        listed = body["state"] if isinstance(body["state"], list) else [body["state"]]
        files = dict(content_from_json(one) for one in listed)
        header, scalars = body["header"], body["scalars"]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"it lacks or misstates {error}") from error
    expected = [shard_file(shard, len(listed)) for shard in range(len(listed))]
    if list(files) not in ([STATE_FILE], expected):
        raise CheckpointError(f"it speaks of the files {', '.join(map(repr, list(files)[:8]))}")
    return Manifest(Header.from_json(header), scalars, files)


def content_to_json(name: str, content: Content) -> dict[str, Any]:
    return {
        "file": name,
        "bytes": content.bytes,
        "xxh3_128": content.digest,
        "chunk_bytes": CHUNK_BYTES,
        "chunks_xxh3_64": list(content.chunks),
    }


def content_from_json(body: Any) -> tuple[str, Content]:
    """Raises CheckpointError, ValueError, TypeError, KeyError, OverflowError."""
    if body["chunk_bytes"] != CHUNK_BYTES:
        raise CheckpointError(f"it speaks of {body['file']!r} in chunks of {body['chunk_bytes']!r} bytes")
    return str(body["file"]), Content(
        int(body["bytes"]), str(body["xxh3_128"]), tuple(map(str, body["chunks_xxh3_64"]))
    )


def unsealed(raw: bytes) -> Any:
    """Return the content that `sealed` was given. Raises CheckpointError."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"it has {len(raw)} bytes, over the limit of {MAX_MANIFEST_BYTES}")
    text, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    if seal != _SEAL % xxhash.xxh3_128_hexdigest(text).encode():
        raise CheckpointError(f"its {len(raw)} bytes do not match the hash at their end: it is torn or damaged")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it cannot be read: {error}") from error
