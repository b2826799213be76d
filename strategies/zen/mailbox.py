"""The messages of a run's other ranks that wait to be used, and how long is waited for one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput, PeerLost
from atoll.strategies.zen.schemes import Awaited, Received

MAX_STAGES: Final = 16384
_Place = tuple[int, int, int, int]  # round, tensor, stage, rank


class Mailbox:
    """A FrameReceiver: `deliver` and `fail` run on the transport's thread, the rest on the training thread.

    What cannot be is refused at once, and ends the run: in a synchronous exchange nobody may go on without it."""

    def __init__(self, names: Sequence[str], largest: Sequence[int]) -> None:
        """names: of the tensors; largest: bytes that no message of each exceeds."""
        self._names, self._largest = names, largest
        self._changed = threading.Condition()
        self._kept: dict[_Place, bytes | memoryview] = {}
        self._round = 0  # that is under way
        self._broken: PeerLost | BadInput | None = None

    def begin(self, round_: int) -> None:
        with self._changed:
            self._round = round_
            self._kept = {place: payload for place, payload in self._kept.items() if place[0] >= round_}

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        """count: the stage. Returns why it was refused."""
        with self._changed:
            place = (step, tensor, count, origin)
            flaw = self._flaw(kind, place, len(payload))
            if flaw is None:
                self._kept[place] = payload
            elif self._broken is None:
                self._broken = BadInput(f"rank {origin} sent a message that cannot be: {flaw}")
            self._changed.notify_all()
        return flaw

    def _flaw(self, kind: int, place: _Place, length: int) -> str | None:
        step, tensor, stage, _ = place
        if kind != Kind.DIRECT or tensor >= len(self._names) or stage >= MAX_STAGES:
            return f"kind {kind}, tensor {tensor}, stage {stage}"
        if not self._round <= step <= self._round + 1:  # who has all of a round begins the next one
            return f"it is of round {step}, in round {self._round}"
        if length > self._largest[tensor]:
            return f"{length} bytes of {self._names[tensor]}, of which no message has more than {self._largest[tensor]}"
        return f"a second one of {self._names[tensor]}, stage {stage}" if place in self._kept else None

    def fail(self, reason: str) -> None:
        """Wakes the waiter, which raises PeerLost."""
        with self._changed:
            self._broken = self._broken or PeerLost(reason)
            self._changed.notify_all()

    def take(self, tensor: int, awaited: Awaited) -> Received | None:
        """The messages, once all have come."""
        with self._changed:
            return self._take(tensor, awaited)

    def wait(self, awaited: Sequence[tuple[int, Awaited]], deadline_s: float) -> None:
        """Until one of these (tensor, messages) is complete. Raises PeerLost, BadInput."""
        with self._changed:
            come = self._changed.wait_for(
                lambda: self._broken is not None or any(self._complete(*one) for one in awaited), deadline_s
            )
            if isinstance(self._broken, BadInput):
                raise self._broken
            if any(self._complete(*one) for one in awaited):
                return
            if self._broken is not None:
                raise self._broken
            if not come:
                tensor, first = awaited[0]
                silent = next(rank for rank in first.ranks if self._place(tensor, first, rank) not in self._kept)
                raise PeerLost(f"rank {silent} sent nothing of {self._names[tensor]} for {deadline_s:.0f} s")

    def _take(self, tensor: int, awaited: Awaited) -> Received | None:
        if not self._complete(tensor, awaited):
            return None
        return [self._kept.pop(self._place(tensor, awaited, rank)) for rank in awaited.ranks]

    def _complete(self, tensor: int, awaited: Awaited) -> bool:
        return all(self._place(tensor, awaited, rank) in self._kept for rank in awaited.ranks)

    def _place(self, tensor: int, awaited: Awaited, rank: int) -> _Place:
        return self._round, tensor, awaited.stage, rank
