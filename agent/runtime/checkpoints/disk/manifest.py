"""The manifest: header, scalars and the hashes of the state files. A checkpoint without a sound one does not exist."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.errors import CheckpointError

CHUNK_BYTES: Final = 8 << 20  # what is hashed on its own


@dataclass(frozen=True)
class Content:
    """Content of a state file, byte for byte."""

    bytes: int
    digest: str  # xxh3_128 of all, hex
    chunks: tuple[str, ...]  # xxh3_64 of every CHUNK_BYTES, hex

    def difference(self, seen: Content) -> str | None:
        """Return the first difference from `seen`, in words; None if there is none."""
        if self == seen:
            return None
        if self.bytes != seen.bytes:
            return f"it has {seen.bytes} bytes; {self.bytes} were written"
        for index, (written, read) in enumerate(zip(self.chunks, seen.chunks, strict=False)):
            if written != read:
                begin = index * CHUNK_BYTES
                end = min(begin + CHUNK_BYTES, self.bytes)
                return f"bytes {begin} to {end} are not those that were written (xxh3 {read}, not {written})"
        return f"its hash is {seen.digest}, not {self.digest}"


class Hasher:
    """Hashes a stream as a whole and by chunk."""

    def __init__(self) -> None:
        self._whole, self._chunk = xxhash.xxh3_128(), xxhash.xxh3_64()
        self._bytes = 0
        self._chunks: list[str] = []

    def update(self, data: memoryview) -> None:
        self._whole.update(data)
        while data:
            room = CHUNK_BYTES - self._bytes % CHUNK_BYTES
            part, data = data[:room], data[room:]
            self._chunk.update(part)
            self._bytes += len(part)
            if self._bytes % CHUNK_BYTES == 0:
                self._chunks.append(self._chunk.hexdigest())
                self._chunk.reset()

    def content(self) -> Content:
        last = (self._chunk.hexdigest(),) if self._bytes % CHUNK_BYTES else ()
        return Content(self._bytes, self._whole.hexdigest(), (*self._chunks, *last))


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
        "state": states,
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
        files = dict(content_from_json(one) for one in body["state"])
        header, scalars = body["header"], body["scalars"]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"it lacks or misstates {error}") from error
    expected = [shard_file(shard, len(files)) for shard in range(len(files))]
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
