"""One holder of this rank's copies, as its sender sees it. On the sender's thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from atoll.agent.runtime.checkpoints.memory.replication.chunk import ChunkAck, FileChunk, place_of
from atoll.agent.runtime.checkpoints.memory.replication.path_model import PathModel
from atoll.agent.runtime.checkpoints.memory.replication.sealing import Seal

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
