"""Learns from its acknowledgements how fast one holder takes copies, and how much may be on the way to it. Pure.

Source: delivery rates as in BBR (Cardwell et al., 2016): what was delivered between two answers, over the longer of the
times in which it was sent and answered. A high quantile of the rates and the shortest time to an answer, of chunks that
found nothing before them, are the link's; what is beyond both is a queue of one's own making."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

MAX_CHUNK_BYTES: Final = 1 << 20
"""The largest chunk."""
_MIN_CHUNK_BYTES: Final = 16 * 1024
"""The smallest chunk: less costs more work at both ends than it carries."""
_CHUNK_MULTIPLE_BYTES: Final = 4096
"""Chunks are multiples of a page."""
_FIRST_WINDOW_BYTES: Final = 512 * 1024
"""Bytes that may be under way before the link is measured."""
_MIN_WINDOW_BYTES: Final = 64 * 1024
"""The fewest bytes that may be under way."""
_MAX_WINDOW_BYTES: Final = 64 << 20
"""The most bytes that may be under way."""
_DELAY_FACTOR: Final = 1.25
"""Times the link's own delay that the window covers: more than one, so that a risen rate is seen."""
_THREAD_DELAY_S: Final = 0.01
"""Seconds that either end's thread may wait for a processor beside training; the window covers them as well."""
CHUNKS_PER_WINDOW: Final = 8
"""Chunks of a window: the holder stores one while others are under way."""
_MIN_CHUNK_S: Final = 5e-5
"""Seconds of work that a chunk takes at either end, at least."""
_RATES_KEPT: Final = 64
"""Newest delivery rates that count."""
_RATE_QUANTILE: Final = 0.8
"""Quantile of the delivery rates that is the link's bandwidth."""
_DELAYS_KEPT: Final = 16
"""Newest answers to lone chunks that count."""


@dataclass(frozen=True, slots=True)
class _SentChunk:
    end: int  # position after it
    at_s: float
    delivered: int  # bytes, when it was sent
    delivered_s: float
    first_s: float  # when the oldest chunk was sent that counts for its rate
    alone: bool  # nothing else was under way


class PathModel:
    """`sent` and `reached` in the order in which things happen; times never go back."""

    def __init__(self) -> None:
        self._under_way: deque[_SentChunk] = deque()
        self._rates: deque[float] = deque(maxlen=_RATES_KEPT)
        self._alone: deque[tuple[float, int]] = deque(maxlen=_DELAYS_KEPT)  # seconds to the answer, bytes
        self._delivered = 0
        self._delivered_s = self._first_s = 0.0
        self._position = 0
        self.bandwidth: float | None = None
        """Bytes a second; None until the first answer."""
        self.window_bytes = _FIRST_WINDOW_BYTES
        self.chunk_bytes = _FIRST_WINDOW_BYTES // CHUNKS_PER_WINDOW

    @property
    def delay_s(self) -> float:
        """Seconds from sending a chunk until its answer, if it is alone on its way."""
        return min((answered_s for answered_s, _ in self._alone), default=0.0)

    @property
    def queued_s(self) -> float:
        """Seconds until the link has carried the bytes under way that exceed its own delay: the queue of copies."""
        if self.bandwidth is None or not self._under_way or len(self._rates) < CHUNKS_PER_WINDOW:
            return 0.0
        return max((self._under_way[-1].end - self._position) / self.bandwidth - self.delay_s, 0.0)

    @property
    def alpha_s(self) -> float:
        """Seconds that a chunk costs beside its bytes: its part of the delay, which a whole window shares."""
        if self.bandwidth is None:
            return _MIN_CHUNK_S
        beside_s = min((answered_s - length / self.bandwidth for answered_s, length in self._alone), default=0.0)
        return max(beside_s * self.chunk_bytes / self.window_bytes, _MIN_CHUNK_S)

    def restart(self, position: int) -> None:
        """Forget chunks under way; the next chunk begins at `position`."""
        self._under_way.clear()
        self._position = position

    def sent(self, end: int, now_s: float) -> None:
        """A chunk that ends at position `end` left."""
        alone = not self._under_way
        if alone:
            self._delivered_s = self._first_s = now_s
        self._under_way.append(_SentChunk(end, now_s, self._delivered, self._delivered_s, self._first_s, alone))

    def reached(self, position: int, now_s: float) -> None:
        """The holder has everything up to `position`."""
        newest = None
        while self._under_way and self._under_way[0].end <= position:
            newest = self._under_way.popleft()
            if newest.alone:
                self._alone.append((now_s - newest.at_s, newest.end - self._position))
        if newest is None:
            return
        self._delivered += newest.end - self._position
        self._position = newest.end
        took_s = max(now_s - newest.delivered_s, newest.at_s - newest.first_s)
        self._delivered_s, self._first_s = now_s, newest.at_s
        if took_s > 0:
            self._rates.append((self._delivered - newest.delivered) / took_s)
            self._measure()

    def _measure(self) -> None:
        self.bandwidth = sorted(self._rates)[int(_RATE_QUANTILE * (len(self._rates) - 1))]
        if len(self._rates) < CHUNKS_PER_WINDOW:
            return  # of one chunk that was alone the rate is far too low
        wanted = self.bandwidth * (_DELAY_FACTOR * self.delay_s + _THREAD_DELAY_S)
        self.window_bytes = round(min(max(wanted, _MIN_WINDOW_BYTES), _MAX_WINDOW_BYTES))
        chunk = self.window_bytes // CHUNKS_PER_WINDOW // _CHUNK_MULTIPLE_BYTES * _CHUNK_MULTIPLE_BYTES
        self.chunk_bytes = min(max(chunk, _MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
