"""The heads of messages between replica senders: of a chunk of a file, and of its acknowledgement. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Final

from atoll.agent.runtime.checkpoints.memory.shards.shard_file import PAGE_BYTES

_MAGIC: Final = b"ATMD"


@dataclass(frozen=True, slots=True)
class FileChunk:
    """The head of a message whose second part is the sealed bytes. number: of the seal."""

    run: int
    step: int
    owner: int
    position: int
    total: int  # bytes of the file that count
    number: int

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<4sQQIQQQ")

    def pack(self) -> bytes:
        return self.LAYOUT.pack(_MAGIC, self.run, self.step, self.owner, self.position, self.total, self.number)

    @staticmethod
    def unpack(raw: bytes | memoryview) -> FileChunk | None:
        """None where it is none."""
        if len(raw) != FileChunk.LAYOUT.size:
            return None
        magic, *numbers = FileChunk.LAYOUT.unpack(raw)
        return FileChunk(*numbers) if magic == _MAGIC else None


@dataclass(frozen=True, slots=True)
class ChunkAck:
    """The head of an answer, which is sealed with nothing in it. chunk: number of the one that is answered."""

    run: int
    step: int
    reached: int  # everything up to this position is there
    chunk: int
    number: int

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<4sQQQQQ")

    def pack(self) -> bytes:
        return self.LAYOUT.pack(_MAGIC, self.run, self.step, self.reached, self.chunk, self.number)

    @staticmethod
    def unpack(raw: bytes | memoryview) -> ChunkAck | None:
        """None where it is none."""
        if len(raw) != ChunkAck.LAYOUT.size:
            return None
        magic, *numbers = ChunkAck.LAYOUT.unpack(raw)
        return ChunkAck(*numbers) if magic == _MAGIC else None


def place_of(position: int, length: int, total: int) -> tuple[int, int]:
    """Return where in the file the chunk sent at `position` lies, and how long it is if `length` bytes are wanted. The
    first page comes last."""
    body = total - PAGE_BYTES
    if position < body:
        return position + PAGE_BYTES, min(length, body - position)
    return position - body, min(length, total - position)
