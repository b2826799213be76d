"""The queue of frames that wait to leave for one peer, most urgent first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

from atoll.agent.runtime.transport.frames import Kind

_FIRST: Final = -1
_LAST: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """An encoded frame on its way, the same for all its receivers."""

    kind: Kind
    step: int
    order: int
    header: bytes
    payload: bytes | memoryview

    @property
    def bytes(self) -> int:
        return len(self.header) + len(self.payload)


@dataclass(slots=True)
class SendQueue:
    """Queue sorted by (step, order), so that a late message for an urgent layer overtakes earlier ones.

    CONTROL comes first. GOODBYE comes last, since nothing else may follow it."""

    bytes: int = 0
    _heap: list[tuple[int, int, int, EncodedFrame]] = field(default_factory=list)
    _since_s: dict[int, float] = field(default_factory=dict)  # by sequence number; oldest first
    _sequence: int = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, encoded: EncodedFrame, now_s: float) -> None:
        self._sequence += 1
        if encoded.kind in {Kind.CONTROL, Kind.HELLO}:
            step, order = _FIRST, 0
        elif encoded.kind is Kind.GOODBYE:
            step, order = _LAST, 0
        else:
            step, order = encoded.step, encoded.order
        heapq.heappush(self._heap, (step, order, self._sequence, encoded))
        self._since_s[self._sequence] = now_s
        self.bytes += encoded.bytes

    def pop(self, max_frames: int, max_bytes: int) -> list[EncodedFrame]:
        """The most urgent ones, together at most `max_bytes`, but at least one if there is any."""
        batch: list[EncodedFrame] = []
        room = max_bytes
        while self._heap and len(batch) < max_frames:
            _, _, sequence, encoded = self._heap[0]
            if batch and encoded.bytes > room:
                break
            heapq.heappop(self._heap)
            del self._since_s[sequence]
            batch.append(encoded)
            room -= encoded.bytes
            self.bytes -= encoded.bytes
        return batch

    def waited_s(self, now_s: float) -> float:
        """Return the seconds that the oldest message has waited; 0 if there is none."""
        return now_s - next(iter(self._since_s.values()), now_s)

    def clear(self) -> None:
        self._heap.clear()
        self._since_s.clear()
        self.bytes = 0
