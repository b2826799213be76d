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


def _nobody() -> None: ...


class StagedMailbox:
    """A FrameReceiver: `deliver` and `fail` run on the transport's thread, the rest on the one that sums.

    An impossible message is refused at once, and ends the run: a synchronous exchange cannot continue without the
    right one."""

    def __init__(
        self, names: Sequence[str], largest: Sequence[int], stages: int, changed: Callable[[], None] = _nobody
    ) -> None:
        """names: of the tensors, or of the first of those that are summed together. largest: bytes that no message of
        each exceeds. stages: their largest number. changed: called when a message came, or nothing more will come."""
        self.names, self._largest, self._stages, self._tell = names, largest, stages, changed
        self._changed = threading.Condition()
        self._kept: dict[_Place, Message] = {}
        self._round = 0  # under way
        self.broken: AtollError | None = None

    def begin(self, round_: int) -> None:
        with self._changed:
            self._round = round_
            self._kept = {place: payload for place, payload in self._kept.items() if place[0] >= round_}

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: Message
    ) -> str | None:
        """Store a message. count: the stage. Returns why it was refused."""
        with self._changed:
            place = (step, tensor, count, origin)
            flaw = self._flaw(kind, place, len(payload))
            if flaw is None:
                self._kept[place] = payload
            elif not isinstance(self.broken, BadInput):
                self.broken = BadInput(f"rank {origin} sent a message that cannot be: {flaw}")
            self._changed.notify_all()
        self._tell()
        return flaw

    def fail(self, reason: str) -> None:
        """Wake the waiter, which raises PeerLost."""
        with self._changed:
            self.broken = self.broken or PeerLost(reason)
            self._changed.notify_all()
        self._tell()

    def take(self, tensor: int, awaited: Awaited) -> list[Message] | None:
        """Return the messages once all have come, and remove them; None before."""
        with self._changed:
            if self._missing(tensor, awaited) is not None:
                return None
            return [self._kept.pop((self._round, tensor, awaited.stage, rank)) for rank in awaited.ranks]

    def silent(self, tensor: int, awaited: Awaited) -> int | None:
        """Return the first rank whose message has not come."""
        with self._changed:
            return self._missing(tensor, awaited)

    def wait(self, awaited: Sequence[tuple[int, Awaited]], deadline_s: float) -> None:
        """Wait until one of these (tensor, messages) is complete. Raises PeerLost, BadInput."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken is not None or self._any_complete(awaited), deadline_s)
            # Messages that a peer sent before it was lost count; impossible ones do not.
            if self._any_complete(awaited) and not isinstance(self.broken, BadInput):
                return
            if self.broken is not None:
                raise self.broken
            tensor, first = awaited[0]
            rank = self._missing(tensor, first)
            raise PeerLost(f"rank {rank} sent nothing of {self.names[tensor]} for {deadline_s:.0f} s")

    def _any_complete(self, awaited: Sequence[tuple[int, Awaited]]) -> bool:
        return any(self._missing(tensor, messages) is None for tensor, messages in awaited)

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
