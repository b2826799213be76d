"""The parts of averages that other replicas sent, until they are used; and who declined to take part."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput, PeerLost

F32 = npt.NDArray[np.float32]

HEADER: Final = struct.Struct("<BxxxxxxxQd")  # purpose, attempt, weight
END_OF_ROUND: Final = 0
"""In place of a group's number: the average of all."""
START_OF_RUN: Final = 2**32 - 1
"""Likewise: all take over the first one's state."""


class Purpose(IntEnum):
    PART = 0  # a slice of the sender's state, for the member that averages it
    RESULT = 1  # an averaged slice, from the member that did
    DECLINE = 2  # the sender had gone on when the group was formed


class PartPlace(NamedTuple):
    """What a message is of. attempt: who takes part, a bit for each member by its place in the group."""

    round: int
    group: int
    purpose: Purpose
    attempt: int
    sender: int


@dataclass(frozen=True, slots=True)
class PartMessage:
    weight: float
    slice_N: F32


class PartMailbox:
    """A FrameReceiver: `deliver` and `fail` run on the transport's thread, the rest on the training thread."""

    def __init__(self, size: int, decline: Callable[[int, int, int], None]) -> None:
        """size: entries of a whole state, which no message exceeds. decline: tell (rank, round, group), at once."""
        self._most_bytes, self._decline = HEADER.size + 4 * size, decline
        self._changed = threading.Condition()
        self._kept: dict[PartPlace, PartMessage] = {}
        self._signals: dict[tuple[int, int, int], int] = {}  # by round, group, sender: of mine that it was formed for
        self._declined: set[tuple[int, int, int]] = set()  # round, group, sender
        self._round, self._begun = 0, False  # before the first one any may come: others may have begun
        self._passed = 0  # signals up to this one are over: answered and averaged, or waited for in vain
        self._broken: PeerLost | BadInput | None = None

    def begin(self, round_: int) -> None:
        with self._changed:
            self._round, self._begun = round_, True
            self._kept = {place: one for place, one in self._kept.items() if place.round >= round_}
            self._signals = {key: one for key, one in self._signals.items() if key[0] >= round_}
            self._declined = {key for key in self._declined if key[0] >= round_}

    def pass_by(self, signal: int) -> None:
        """This signal is over. Groups that were formed for it, or will be, are declined."""
        with self._changed:
            self._passed = signal
            late = [key for key, mine in self._signals.items() if 0 < mine <= signal]
            for key in late:
                del self._signals[key]
            self._kept = {
                place: one for place, one in self._kept.items() if (place.round, place.group, place.sender) not in late
            }
        for round_, group, sender in late:
            self._decline(sender, round_, group)

    def averaged(self, signal: int, group: int) -> None:
        """This signal was answered with this group, which has averaged."""
        with self._changed:
            self._passed = signal
            self._kept = {place: one for place, one in self._kept.items() if place.group != group}
            self._signals = {key: mine for key, mine in self._signals.items() if key[1] != group}

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        """step: the round. tensor: the group. count: the signal of this rank that it was formed for. Returns why it was
        refused."""
        if kind != Kind.DIRECT or not HEADER.size <= len(payload) <= self._most_bytes or (len(payload) % 4):
            return "malformed"
        purpose, attempt, weight = HEADER.unpack_from(payload)
        if purpose not in set(Purpose) or not (math.isfinite(weight) and weight >= 0):
            return "malformed"
        with self._changed:
            if step < self._round:
                return "old step"
            if self._begun and step > self._round + 1:
                return "step too far ahead"
            if purpose == Purpose.DECLINE:
                self._declined.add((step, tensor, origin))
                self._changed.notify_all()
                return None
            if count == 0 or count > self._passed:
                self._signals[step, tensor, origin] = count
                slice_N = np.frombuffer(bytes(payload[HEADER.size :]), np.float32)
                place = PartPlace(step, tensor, Purpose(purpose), attempt, origin)
                self._kept[place] = PartMessage(weight, slice_N)
                self._changed.notify_all()
                return None
        if purpose == Purpose.PART:
            self._decline(origin, step, tensor)
        return None

    def fail(self, reason: str) -> None:
        """Wakes the waiter, which raises PeerLost."""
        with self._changed:
            self._broken = self._broken or PeerLost(reason)
            self._changed.notify_all()

    def ended(self) -> tuple[int, ...]:
        """Who waits at the end of this round already. Raises PeerLost where a peer is gone."""
        with self._changed:
            if self._broken is not None:
                raise self._broken
            return tuple(sorted({at.sender for at in self._kept if at[:2] == (self._round, END_OF_ROUND)}))

    def declined(self, group: int) -> set[int]:
        """Who does not take part."""
        with self._changed:
            return {sender for round_, of, sender in self._declined if (round_, of) == (self._round, group)}

    def collect(
        self, group: int, purpose: Purpose, attempt: int, senders: Collection[int], deadline_s: float
    ) -> dict[int, PartMessage] | None:
        """What these sent; None as soon as one of them declined. Raises PeerLost where one is gone or sends nothing."""
        places = {sender: PartPlace(self._round, group, purpose, attempt, sender) for sender in senders}

        def refused() -> bool:
            return any((self._round, group, sender) in self._declined for sender in senders)

        def complete() -> bool:
            return all(place in self._kept for place in places.values())

        with self._changed:
            self._changed.wait_for(lambda: complete() or refused() or self._broken is not None, deadline_s)
            if complete():
                return {sender: self._kept.pop(place) for sender, place in places.items()}
            if self._broken is not None:
                raise self._broken
            if refused():
                return None
            silent = next(sender for sender, place in places.items() if place not in self._kept)
            raise PeerLost(f"rank {silent} sent nothing of an average for {deadline_s:.0f} s")
