"""Mailbox of the messages of a run's other ranks, and the wait for a message with its deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import AtollError, BadInput, PeerLost

Message = bytes | memoryview
_Place = tuple[int, int, int, int]  # round, tensor, stage, rank


@dataclass(frozen=True, slots=True)
class Awaited:
    """Messages of a stage to wait for, one of each of these ranks; they are returned in this order."""

    stage: int
    ranks: tuple[int, ...]


class StagedMailbox:
    """A FrameReceiver: `deliver` and `fail` run on the transport's thread, the rest on the one that sums.

    An impossible message is refused at once, and ends the run: a synchronous exchange cannot continue without the
    right one."""

    def __init__(self, names: Sequence[str], largest: Sequence[int], stages: int, changed: Callable[[], None]) -> None:
        """names: of the tensors, or of the first of those that are summed together. largest: bytes that no message of
        each exceeds. stages: their largest number. changed: called when a message came, or nothing more will come."""
        self.names, self._largest, self._stages, self._changed = names, largest, stages, changed
        self._lock = threading.Lock()
        self._kept: dict[_Place, Message] = {}
        self._round = 0  # under way
        self.broken: AtollError | None = None

    def begin(self, round_: int) -> None:
        with self._lock:
            self._round = round_
            self._kept = {place: payload for place, payload in self._kept.items() if place[0] >= round_}

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: Message
    ) -> str | None:
        """Store a message. count: the stage. Returns why it was refused."""
        with self._lock:
            place = (step, tensor, count, origin)
            flaw = self._flaw(kind, place, len(payload))
            if flaw is None:
                self._kept[place] = payload
            elif not isinstance(self.broken, BadInput):
                self.broken = BadInput(f"rank {origin} sent a message that cannot be: {flaw}")
        self._changed()
        return flaw

    def fail(self, reason: str) -> None:
        """Record that no more messages will come."""
        with self._lock:
            self.broken = self.broken or PeerLost(reason)
        self._changed()

    def take(self, tensor: int, awaited: Awaited) -> list[Message] | None:
        """Return the messages once all have come, and remove them; None before."""
        with self._lock:
            if self._missing(tensor, awaited) is not None:
                return None
            return [self._kept.pop((self._round, tensor, awaited.stage, rank)) for rank in awaited.ranks]

    def silent(self, tensor: int, awaited: Awaited) -> int | None:
        """Return the first rank whose message has not come."""
        with self._lock:
            return self._missing(tensor, awaited)

    def _missing(self, tensor: int, awaited: Awaited) -> int | None:
        places = ((self._round, tensor, awaited.stage, rank) for rank in awaited.ranks)
        return next((place[-1] for place in places if place not in self._kept), None)

    def _flaw(self, kind: int, place: _Place, length: int) -> str | None:
        step, tensor, stage, _ = place
        if kind != Kind.DIRECT or tensor >= len(self.names) or stage >= self._stages:
            return f"kind {kind}, tensor {tensor}, stage {stage}"
        if not self._round <= step <= self._round + 1:  # a rank that has all of a round begins the next one
            return f"it is of round {step}, in round {self._round}"
        if length > self._largest[tensor]:
            return f"{length} bytes of {self.names[tensor]}, of which no message has more than {self._largest[tensor]}"
        return f"a second one of {self.names[tensor]}, stage {stage}" if place in self._kept else None
