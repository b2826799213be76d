"""Hashes of a file's bytes: of the whole, and of each chunk, so that damage can be located."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import xxhash

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
