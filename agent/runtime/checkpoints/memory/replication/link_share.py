"""Decides how much of a link copies take beside an exchange that may use all of it. Pure.

Where a plan fills links as far as they bear, whatever copies take is the exchange's: the link seems thinner, less is
planned, more is left to copies. So copies have no right to what looks idle. What tells is for how long the exchange
keeps its connections busy: of a link that it needs, about USED of the time whatever that link carries, of a fat one
next to nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

COPIES_SHARE: Final = 0.15
"""Of a link's bandwidth that copies have where the exchange needs the link, and never more in the long run. A plan
fills 70 % of its time, what a round trip takes is beside that."""
ROOM: Final = 2.5
"""Times the time that the exchange takes are left to it: it comes in bursts, and plans follow a link from afar. A plan
that fills 60 % stood for minutes with 45 %."""
FAT: Final = 0.6
"""A share beyond which copies are not limited: the exchange hardly needs the link."""
_REMEMBERED_S: Final = 15.0
_BELIEVED_S: Final = 1.0  # for which a link counts as needed before anything is known
_CREDIT_S: Final = 0.25
_CREDIT_CHUNKS: Final = 4
"""What may be saved up, for the next idle moment."""


class LinkShare:
    """Told how long connections to other machines were busy; times never go back."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._busy_s: Mapping[int, float] = {}
        self._needed, self._known_s = 1.0, _BELIEVED_S
        self._total_s = 0.0  # for which any connection was busy
        self._credit = 0.0  # bytes
        self._credit_s: float | None = None  # when that was so
        self._mark: tuple[float, float, Mapping[int, float]] = (0.0, 0.0, {})  # time, _total_s, _busy_s

    @property
    def share(self) -> float | None:
        """Of the link's bandwidth; None: whatever is idle."""
        share = max(COPIES_SHARE, 1 - ROOM * self._needed)
        return None if share >= FAT else share

    def observe(self, busy_s: Mapping[int, float], now_s: float) -> None:
        """busy_s: by peer, seconds since the run began with bytes of the exchange on their way."""
        before_s, self._at_s = self._at_s, now_s
        before, self._busy_s = self._busy_s, busy_s
        if before_s is None or not (took_s := now_s - before_s) > 0:
            return
        # Peers share the link and are seldom busy at the same moments: the time in which any of them is.
        idle = math.prod(1 - min(max(one - before.get(peer, one), 0.0) / took_s, 1.0) for peer, one in busy_s.items())
        self._total_s += (1 - idle) * took_s
        self._known_s = min(self._known_s + took_s, _REMEMBERED_S)
        self._needed += (1 - idle - self._needed) * min(took_s / self._known_s, 1.0)

    def allowed(self, bandwidth: float, chunk_bytes: int, now_s: float, *, waits: bool) -> int:
        """Bytes that may leave now, while `share` is one: some of what has been saved up. waits: something of the
        exchange is on its way; then a chunk, only where nothing more can be saved."""
        rate = (self.share or 1.0) * bandwidth
        most = max(_CREDIT_S * rate, _CREDIT_CHUNKS * chunk_bytes)
        if self._credit_s is not None:
            self._credit = min(self._credit + rate * (now_s - self._credit_s), most)
        self._credit_s = now_s
        if waits:
            return chunk_bytes if self._credit >= most else 0
        return int(self._credit)

    def missing_s(self, bandwidth: float, wanted_bytes: int) -> float:
        """Until so much has been saved up."""
        return max(wanted_bytes - self._credit, 0.0) / ((self.share or 1.0) * bandwidth)

    def spend(self, sent_bytes: int) -> None:
        self._credit -= sent_bytes

    def mark(self) -> None:
        """Bytes of a copy begin to leave."""
        self._mark = (self._at_s or 0.0, self._total_s, self._busy_s)

    def beside(self, arrived_bytes: int) -> tuple[int, int] | None:
        """The part of a copy's bytes, which arrived since the last mark, that the link carried while the exchange was
        busy; and the peer that was so most. None where nobody was."""
        at_s, total_s, before = self._mark
        self.mark()
        took_s, busy_s = (self._at_s or 0.0) - at_s, self._total_s - total_s
        grown = {peer: one - before.get(peer, one) for peer, one in self._busy_s.items()}
        busiest = max(grown, key=grown.__getitem__, default=None)
        if busiest is None or not took_s > 0 or not busy_s > 0:
            return None
        return busiest, round(arrived_bytes * min(busy_s / took_s, 1.0))
