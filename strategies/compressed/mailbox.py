"""Messages of a run's other ranks that wait to be used, and work that waits for the exchange's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import AtollError, BadInput, PeerLost

MAX_STAGES: Final = 4
Message = bytes | memoryview
_Place = tuple[int, int, int, int]  # round, tensor, stage, rank


@dataclass(frozen=True, slots=True)
class AwaitedFrom:
    """Messages of one stage from these ranks; they come in this order."""

    stage: int
    ranks: tuple[int, ...]


class GroupMailbox:
    """A FrameReceiver: `deliver` and `fail` run on the transport's thread, `changed` tells the exchange's.

    What cannot be is refused at once, and ends the run: in a synchronous exchange nobody may go on without it."""

    def __init__(self, names: Sequence[str], largest: Sequence[int], changed: Callable[[], None]) -> None:
        """names: of the tensors, by which groups are named that begin with them; largest: bytes that no message of such
        a group exceeds. changed: called where a message came, or nothing more is to come."""
        self.names, self._largest, self._changed = names, largest, changed
        self._lock = threading.Lock()
        self._kept: dict[_Place, Message] = {}
        self._round = 0  # that is under way
        self.broken: AtollError | None = None

    def begin(self, round_: int) -> None:
        with self._lock:
            self._round = round_
            self._kept = {place: payload for place, payload in self._kept.items() if place[0] >= round_}

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: Message
    ) -> str | None:
        """count: the stage. Returns why it was refused."""
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
        with self._lock:
            self.broken = self.broken or PeerLost(reason)
        self._changed()

    def take(self, tensor: int, awaited: AwaitedFrom) -> list[Message] | None:
        """The messages, once all have come."""
        with self._lock:
            places = [(self._round, tensor, awaited.stage, rank) for rank in awaited.ranks]
            if any(place not in self._kept for place in places):
                return None
            return [self._kept.pop(place) for place in places]

    def silent(self, tensor: int, awaited: AwaitedFrom) -> int | None:
        """The first rank whose message has not come."""
        with self._lock:
            kept = self._kept
            missing = (rank for rank in awaited.ranks if (self._round, tensor, awaited.stage, rank) not in kept)
            return next(missing, None)

    def _flaw(self, kind: int, place: _Place, length: int) -> str | None:
        step, tensor, stage, _ = place
        if kind != Kind.DIRECT or tensor >= len(self.names) or stage >= MAX_STAGES:
            return f"kind {kind}, tensor {tensor}, stage {stage}"
        if not self._round <= step <= self._round + 1:  # who has all of a round begins the next one
            return f"it is of round {step}, in round {self._round}"
        if length > self._largest[tensor]:
            return f"{length} bytes of {self.names[tensor]}, of which no message has more than {self._largest[tensor]}"
        return f"a second one of {self.names[tensor]}, stage {stage}" if place in self._kept else None
