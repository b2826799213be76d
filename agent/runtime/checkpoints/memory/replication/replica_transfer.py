"""Transfers of copies: messages, one holder of this rank's copies, one owner whose copies lie here. On the sender's
thread."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from atoll.agent.runtime.checkpoints.memory.replication.path_model import MAX_CHUNK_BYTES, PathModel
from atoll.agent.runtime.checkpoints.memory.replication.sealing import Seal
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import PAGE_BYTES
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import ShardFiles

_MAGIC: Final = b"ATMD"
_CHUNK_HEAD: Final = struct.Struct("<4sQQIQQQ")
_ACK_HEAD: Final = struct.Struct("<4sQQQQQ")


class FileChunk(NamedTuple):
    """Head of a message whose second part is the sealed bytes. number: of the seal."""

    run: int
    step: int
    owner: int
    position: int
    total: int  # bytes of the file that count
    number: int

    def pack(self) -> bytes:
        return _CHUNK_HEAD.pack(_MAGIC, *self)

    @staticmethod
    def unpack(raw: bytes | memoryview) -> FileChunk | None:
        """Return None for anything else."""
        numbers = _unpacked(raw, _CHUNK_HEAD)
        return FileChunk(*numbers) if numbers else None


class ChunkAck(NamedTuple):
    """Head of an answer, which is sealed with nothing in it. chunk: number of the one that is answered."""

    run: int
    step: int
    reached: int  # everything up to this position is there
    chunk: int
    number: int

    def pack(self) -> bytes:
        return _ACK_HEAD.pack(_MAGIC, *self)

    @staticmethod
    def unpack(raw: bytes | memoryview) -> ChunkAck | None:
        """Return None for anything else."""
        numbers = _unpacked(raw, _ACK_HEAD)
        return ChunkAck(*numbers) if numbers else None


def _unpacked(raw: bytes | memoryview, layout: struct.Struct) -> list[int]:
    if len(raw) != layout.size:
        return []
    magic, *numbers = layout.unpack(raw)
    return numbers if magic == _MAGIC else []


def place_of(position: int, length: int, total: int) -> tuple[int, int]:
    """Return where in the file the chunk sent at `position` lies, and how long it is if `length` bytes are wanted. The
    first page comes last."""
    body = total - PAGE_BYTES
    if position < body:
        return position + PAGE_BYTES, min(length, body - position)
    return position - body, min(length, total - position)


RESEND_AFTER_S: Final = 3.0
"""Seconds without an answer after which chunks are sent again."""
RESENDS_UNTIL_NOTICE: Final = 10
"""Resends without an answer after which people are told."""


@dataclass(frozen=True, slots=True)
class ReplicaTransfer:
    """A sealed file that is to be copied. It does not change before all ranks have said that they are done."""

    step: int
    path: Path
    total: int  # bytes of the file that count


class OutgoingReplica:
    """Progress of the present transfer to one holder. Owns its socket."""

    def __init__(
        self, socket: zmq.Socket[bytes], *, run: int, rank: int, holder: int, seals: tuple[Seal, Seal],
        notify: Callable[[str], None],
    ) -> None:  # fmt: skip
        """seals: towards the holder, and from it. notify: what people should know."""
        self.socket, self.holder = socket, holder
        self.path = PathModel()
        self.sent_bytes = self.arrived_bytes = 0  # since the run began
        self._run, self._rank, self._notify = run, rank, notify
        self._towards, self._back = seals
        self._transfer: ReplicaTransfer | None = None
        self._sent = self._reached = 0
        self._first_number = 0  # of the first chunk that left since the place was last gone back to
        self._silent_s = 0.0  # since something came back, without the time in which nothing was to be sent
        self._unanswered = 0  # times that it was sent again

    @property
    def left_bytes(self) -> int:
        """Bytes of the present transfer that have not left yet."""
        return self._transfer.total - self._sent if self._transfer is not None else 0

    @property
    def reached_bytes(self) -> int:
        """Bytes of the present transfer that the holder has."""
        return self._reached

    @property
    def done(self) -> bool:
        """True if the holder has all of the present transfer, or there is none."""
        return self._transfer is None or self._reached == self._transfer.total

    @property
    def under_way(self) -> bool:
        """True if chunks are not acknowledged yet."""
        return self._sent > self._reached

    @property
    def silent(self) -> bool:
        """True if other holders should not wait for this one."""
        return self._unanswered > 0

    def begin(self, transfer: ReplicaTransfer | None) -> None:
        self._transfer = transfer
        self._reached = 0
        self._go_back()

    def waits(self, turn_s: float) -> None:
        """Account for time in which the holder could have answered. Unanswered chunks are sent again after a while."""
        self._silent_s += turn_s
        if self._silent_s <= RESEND_AFTER_S:
            return
        self._go_back()
        self._unanswered += 1
        if self._unanswered == RESENDS_UNTIL_NOTICE:
            silent_s = RESEND_AFTER_S * RESENDS_UNTIL_NOTICE
            self._notify(f"rank {self.holder} takes no copy of this rank's state: no answer for {silent_s:.0f} s")

    def push(self, file: int, allowed: int, is_paused: Callable[[], bool], now_s: Callable[[], float]) -> int:
        """Send of the transfer's open file what the window and `allowed` bytes let through. Returns how many left."""
        transfer, before = self._transfer, self._sent
        if transfer is None:
            return 0
        while not is_paused():
            left = min(transfer.total - self._sent, allowed - (self._sent - before))
            wanted = min(self.path.chunk_bytes, left)
            if wanted <= 0 or self._sent - self._reached + wanted > self.path.window_bytes:
                break
            place, length = place_of(self._sent, wanted, transfer.total)
            number = self._towards.next_number()
            head = FileChunk(self._run, transfer.step, self._rank, self._sent, transfer.total, number).pack()
            sealed = self._towards.seal(number, head, os.pread(file, length, place))
            try:
                self.socket.send_multipart([head, sealed], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break  # not connected: the next turn tries again
            self._sent += length
            self.path.sent(self._sent, now_s())
        self.sent_bytes += self._sent - before
        return self._sent - before

    def hear(self, message: list[zmq.Frame], now_s: float) -> str | None:
        """An answer; why it was not taken."""
        answer = ChunkAck.unpack(message[0].buffer) if len(message) == 2 else None
        if answer is None:
            return "malformed"
        if self._back.open(answer.number, message[0].buffer, message[1].buffer) is None:
            return "not from this rank"
        transfer = self._transfer
        if transfer is None or (answer.run, answer.step) != (self._run, transfer.step):
            return "of another step"
        if answer.reached > transfer.total:
            return "makes no sense"
        if answer.reached > self._reached:
            self.path.reached(answer.reached, now_s)
            self.arrived_bytes += answer.reached - self._reached
            self._reached, self._silent_s, self._unanswered = answer.reached, 0.0, 0
            if self._sent < self._reached:  # it was gone back, and what was thought lost arrived
                self._go_back()
        elif answer.reached < self._sent and answer.chunk >= self._first_number:
            self._go_back()  # something before the chunk that it answers was lost
        return None

    def _go_back(self) -> None:
        """Return to the position that the holder has acknowledged."""
        self._sent, self._silent_s = self._reached, 0.0
        self._first_number = self._towards.newest_number + 1
        self.path.restart(self._reached)


_NOTHING: Final = b""


class IncomingReplica:
    """Progress of the present copy of another rank's shard."""

    def __init__(self, files: ShardFiles, *, run: int, seals: tuple[Seal, Seal], limit_bytes: int) -> None:
        """seals: towards the owner, and from it. limit_bytes: no file is longer."""
        self._files = files
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
            if 0 < self.step == self.done_step:
                self._files.turn()  # the copy before is complete, and stays
            self._files.next().receive(chunk.total)
            self.step, self._total, self.reached = chunk.step, chunk.total, 0
        if chunk.total != self._total:
            return "makes no sense"
        if chunk.position == self.reached < self._total:
            self._files.next().put(memoryview(payload), place)
            self.reached += length
            if self.reached == self._total:
                self.done_step = chunk.step
        return None

    def answer(self, chunk: FileChunk) -> list[bytes]:
        """Return the acknowledgement of a chunk: how far the copy has come."""
        number = self._towards.next_number()
        head = ChunkAck(self._run, self.step, self.reached, chunk.number, number).pack()
        return [head, self._towards.seal(number, head, _NOTHING)]
