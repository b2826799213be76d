"""The manifest: header, scalars and what the state file must hold. A checkpoint without a sound one does not exist."""

from __future__ import annotations

import json
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


@dataclass(frozen=True)
class Manifest:
    header: Header
    scalars: Any
    state: Content


def to_bytes(manifest: Manifest) -> bytes:
    """JSON whose last member is the hash of every byte before it, so that any flipped bit shows."""
    state = manifest.state
    body = {
        "header": manifest.header.to_json(),
        "state": {
            "file": STATE_FILE,
            "bytes": state.bytes,
            "xxh3_128": state.digest,
            "chunk_bytes": CHUNK_BYTES,
            "chunks_xxh3_64": list(state.chunks),
        },
        "scalars": manifest.scalars,
    }
    try:
        text = json.dumps(body, allow_nan=False).encode()[:-1]
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the scalars of a checkpoint must be plain JSON: {error}. Use pack_state") from error
    sealed = text + _SEAL % xxhash.xxh3_128_hexdigest(text).encode()
    if len(sealed) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the state's numbers and names take {len(sealed)} bytes, over {MAX_MANIFEST_BYTES}. Make tensors of lists"
        )
    return sealed


def from_bytes(raw: bytes) -> Manifest:
    """Raises CheckpointError saying what is wrong with these bytes."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"it has {len(raw)} bytes, over the limit of {MAX_MANIFEST_BYTES}")
    text, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    if seal != _SEAL % xxhash.xxh3_128_hexdigest(text).encode():
        raise CheckpointError(f"its {len(raw)} bytes do not match the hash at their end: it is torn or damaged")
    try:
        body = json.loads(raw)
        state = body["state"]
        content = Content(int(state["bytes"]), str(state["xxh3_128"]), tuple(map(str, state["chunks_xxh3_64"])))
        header, scalars = body["header"], body["scalars"]
        if state["file"] != STATE_FILE or state["chunk_bytes"] != CHUNK_BYTES:
            raise CheckpointError(f"it speaks of {state['file']!r} in chunks of {state['chunk_bytes']!r} bytes")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"it lacks or misstates {error}") from error
    return Manifest(Header.from_json(header), scalars, content)
