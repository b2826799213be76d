"""One owner whose copies lie here, as its sender sees it. On the sender's thread."""

from __future__ import annotations

from typing import Final

import zmq

from atoll.agent.runtime.checkpoints.memory.replication.chunk import ChunkAck, FileChunk, place_of
from atoll.agent.runtime.checkpoints.memory.replication.path_model import MAX_CHUNK_BYTES
from atoll.agent.runtime.checkpoints.memory.replication.sealing import Seal
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import PAGE_BYTES
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import CopyFiles

_NOTHING: Final = b""


class IncomingReplica:
    """Progress of the present copy of another rank's shard."""

    def __init__(self, files: CopyFiles, *, run: int, seals: tuple[Seal, Seal], limit_bytes: int) -> None:
        """seals: towards the owner, and from it. limit_bytes: no file is longer."""
        self.files = files
        self.done_step = 0
        self.step = self.reached = 0
        self._total = 0
        self._run, self._limit_bytes = run, limit_bytes
        self._towards, self._from = seals

    def take(self, chunk: FileChunk, head: zmq.Frame, sealed: zmq.Frame) -> str | None:
        """Store it, if it is what comes next; why it was refused. Raises CheckpointError where there is no room."""
        payload = self._from.open(chunk.number, head.buffer, sealed.buffer)
        if payload is None:
            return "damaged, of another rank or seen before"
        if not PAGE_BYTES < chunk.total <= self._limit_bytes or chunk.step < self.step or not payload:
            return "makes no sense"
        place, length = place_of(chunk.position, len(payload), chunk.total)
        if length != len(payload) or len(payload) > MAX_CHUNK_BYTES:
            return "makes no sense"
        if chunk.step > self.step:
            self.files.begin(chunk.total, turn=0 < self.step == self.done_step)
            self.step, self._total, self.reached = chunk.step, chunk.total, 0
        if chunk.total != self._total:
            return "makes no sense"
        if chunk.position == self.reached < self._total:
            self.files.put(memoryview(payload), place)
            self.reached += length
            if self.reached == self._total:
                self.done_step = chunk.step
        return None

    def answer(self, chunk: FileChunk) -> list[bytes]:
        """Return the acknowledgement of a chunk: how far the copy has come."""
        number = self._towards.next_number()
        head = ChunkAck(self._run, self.step, self.reached, chunk.number, number).pack()
        return [head, self._towards.seal(number, head, _NOTHING)]
