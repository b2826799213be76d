"""The parts of averages that other replicas sent, until they are used; who declined to take part, and who is lost."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput, PeerLost

F32 = npt.NDArray[np.float32]

HEADER: Final = struct.Struct("<BxxxIQd")  # purpose, bytes of the batches' bits, attempt, weight
MOST_BATCH_BYTES: Final = 1 << 16
ROUND_ENDS: Final = 2**31
"""Group number, plus the count of members, of the average of all living replicas at a round's end."""
START_OF_RUN: Final = 2**32 - 1
"""Likewise: all take over the first one's state."""


class Purpose(IntEnum):
    PART = 0  # a slice of the sender's state, for the member that averages it
    RESULT = 1  # an averaged slice, from the member that did
    DECLINE = 2  # the sender had gone on when the group was formed
    WHOLE = 3  # all of an average that the sender has made, for one that lost a member on the way


class PartPlace(NamedTuple):
    """Key of a message. attempt: the participants, a bit for each member by its place in the group."""

    round: int
    group: int
    purpose: Purpose
    attempt: int
    sender: int


@dataclass(frozen=True, slots=True)
class PartMessage:
    """batches: bits of those in the sender's state. weight: of a WHOLE, as how many replicas it averages."""

    weight: float
    batches: int
    slice_N: F32


@dataclass(frozen=True, slots=True)
class MadeAverage:
    """An average that this rank has made."""

    round: int
    group: int
    attempt: int
    whole: PartMessage


class PartMailbox:
    """A FrameReceiver: `deliver`, `lose` and `fail` run on the transport's thread, the rest on the training thread."""

    def __init__(self, size: int, send: Callable[[int, int, int, int, bytes], None]) -> None:
        """size: entries of a whole state, which no message exceeds. send: to rank, (round, group, signal, payload)."""
        self._most_bytes, self._send = HEADER.size + MOST_BATCH_BYTES + 4 * size, send
        self._changed = threading.Condition()
        self._kept: dict[PartPlace, PartMessage] = {}
        self._signals: dict[tuple[int, int, int], int] = {}  # by round, group, sender: of mine that it was formed for
        self._declined: set[tuple[int, int, int]] = set()  # round, group, sender
        self._lost: set[int] = set()
        self._made: MadeAverage | None = None  # the newest: another may have lost a member before it had all of it
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

    def averaged(self, made: MadeAverage, signal: int) -> None:
        """This rank has made this average; signal: of its own, which is over."""
        with self._changed:
            self._passed, self._made = max(self._passed, signal), made
            asks = {place.sender for place in self._kept if place.group == made.group and place.purpose is Purpose.PART}
            self._kept = {place: one for place, one in self._kept.items() if place.group != made.group}
            self._signals = {key: mine for key, mine in self._signals.items() if key[1] != made.group}
        for sender in asks:
            self._give(made, sender)

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        """step: the round. tensor: the group. count: the signal of this rank that it was formed for. Returns why it was
        refused."""
        if kind != Kind.DIRECT or not HEADER.size <= len(payload) <= self._most_bytes or (len(payload) % 4):
            return "malformed"
        purpose, batch_bytes, attempt, weight = HEADER.unpack_from(payload)
        if purpose not in set(Purpose) or not (math.isfinite(weight) and weight >= 0):
            return "malformed"
        if batch_bytes % 4 or batch_bytes > len(payload) - HEADER.size:
            return "malformed"
        with self._changed:
            made = self._made
            asks = purpose == Purpose.PART and made is not None and (made.round, made.group) == (step, tensor)
            if not asks:
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
                    self._keep(PartPlace(step, tensor, Purpose(purpose), attempt, origin), weight, batch_bytes, payload)
                    return None
        if asks and made is not None:
            self._give(made, origin)
        elif purpose == Purpose.PART:
            self._decline(origin, step, tensor)
        return None

    def lose(self, rank: int) -> None:
        """The others go on without it: what it has sent whole counts, and nothing more is waited for."""
        with self._changed:
            self._lost.add(rank)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Wakes the waiter, which raises PeerLost."""
        with self._changed:
            self._broken = self._broken or PeerLost(reason)
            self._changed.notify_all()

    def declined(self, group: int) -> set[int]:
        """Return the members that do not take part."""
        with self._changed:
            return self._lost | {
                sender for round_, of, sender in self._declined if (round_, of) == (self._round, group)
            }

    def whole(self, group: int) -> tuple[int, PartMessage] | None:
        """The average that another member has made of this group, with its attempt."""
        with self._changed:
            for place, message in self._kept.items():
                if place[:3] == (self._round, group, Purpose.WHOLE):
                    return place.attempt, message
        return None

    def collect(
        self, group: int, purpose: Purpose, attempt: int, senders: Collection[int], deadline_s: float
    ) -> dict[int, PartMessage] | None:
        """Return these senders' messages; None as soon as one of them declined or is lost, or another has all of it.
        Raises PeerLost if training ends or one sends nothing."""
        places = {sender: PartPlace(self._round, group, purpose, attempt, sender) for sender in senders}

        def refused() -> bool:
            gone = any(sender in self._lost or (self._round, group, sender) in self._declined for sender in senders)
            return gone or any(place[:3] == (self._round, group, Purpose.WHOLE) for place in self._kept)

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

    def _keep(self, place: PartPlace, weight: float, batch_bytes: int, payload: bytes | memoryview) -> None:
        body = bytearray(payload[HEADER.size :])  # to be written into, as what torch makes
        slice_N = np.frombuffer(body, np.float32, offset=batch_bytes)
        self._kept[place] = PartMessage(weight, int.from_bytes(body[:batch_bytes], "little"), slice_N)
        self._changed.notify_all()

    def _decline(self, to: int, round_: int, group: int) -> None:
        self._tell(to, round_, group, packed(Purpose.DECLINE, 0))

    def _give(self, made: MadeAverage, to: int) -> None:
        whole = made.whole
        payload = packed(Purpose.WHOLE, made.attempt, whole.weight, whole.batches, [whole.slice_N])
        self._tell(to, made.round, made.group, payload)

    def _tell(self, to: int, round_: int, group: int, payload: bytes) -> None:
        try:
            self._send(to, round_, group, 0, payload)
        except PeerLost as error:  # the wire has failed, and says so itself
            self.fail(str(error))


def packed(purpose: Purpose, attempt: int, weight: float = 0.0, batches: int = 0, slices: Sequence[F32] = ()) -> bytes:
    """A message as it travels."""
    size = -(-batches.bit_length() // 32) * 4
    header = HEADER.pack(purpose, size, attempt, weight)
    return b"".join([header, batches.to_bytes(size, "little"), *(one.tobytes() for one in slices)])
