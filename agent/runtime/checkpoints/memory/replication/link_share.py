"""Decides how much of a link copies take beside an exchange that may use all of it. Pure.

Plans fill a link as far as it bears. If copies took what looks idle, the link would seem thinner, the next plan would
use less of it, and copies would take still more. So the share follows from the time for which the exchange keeps its
connections busy: most of the time on a link that it needs, whatever the link carries, and little on a fat one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from humanize import naturalsize

MIN_COPIES_SHARE: Final = 0.15
"""The share of a link's bandwidth that copies have however much the exchange needs the link. A plan fills 70 % of the
link's time; round trips come on top."""
EXCHANGE_RESERVE: Final = 2.5
"""Times the exchange's own time on the link are reserved for it, because it comes in bursts and plans follow a link
with delay. A plan that fills 60 % used 45 % for minutes."""
UNLIMITED_FROM_SHARE: Final = 0.6
"""The share from which on copies are not limited: the exchange hardly needs the link."""
_AVERAGED_S: Final = 15.0
"""Seconds over which the exchange's use of the link is averaged."""
_ASSUMED_NEEDED_S: Final = 1.0
"""Seconds of need that are assumed before anything is measured."""
_MIN_BUSY_S: Final = 0.5
"""Seconds of busy time from which on the exchange's bytes tell the bandwidth."""
_MAX_CREDIT_S: Final = 0.25
"""Seconds of the copies' share that may be saved up for the next idle moment."""
_MIN_CREDIT_CHUNKS: Final = 4
"""Chunks that may be saved up at least, also where they are more than that time's share."""


class LinkShare:
    """Told how long connections to other islands were busy; times never go back."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._busy_s: Mapping[int, float] = {}
        self._left_bytes = 0
        self._carried = self._carrying_s = 0.0  # bytes, and the time that it was busy with them; lately
        self._needed, self._known_s = 1.0, _ASSUMED_NEEDED_S
        self._total_s = 0.0  # for which any connection was busy
        self._credit = 0.0  # bytes
        self._credit_s: float | None = None  # when that was so
        self._mark: tuple[float, float, Mapping[int, float]] = (0.0, 0.0, {})  # time, _total_s, _busy_s

    @property
    def share(self) -> float | None:
        """Share of the link's bandwidth for copies; None: they may take whatever is idle."""
        share = max(MIN_COPIES_SHARE, 1 - EXCHANGE_RESERVE * self._needed)
        return None if share >= UNLIMITED_FROM_SHARE else share

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the link carried while it was busy; infinite where too little is known."""
        return self._carried / self._carrying_s if self._carrying_s >= _MIN_BUSY_S else math.inf

    def observe(self, busy_s: Mapping[int, float], left_bytes: int, now_s: float) -> None:
        """Account for the exchange since the run began. busy_s: by peer, seconds with bytes of it under way.
        left_bytes: its bytes that left."""
        before_s, self._at_s = self._at_s, now_s
        before, self._busy_s = self._busy_s, busy_s
        grown, self._left_bytes = max(left_bytes - self._left_bytes, 0), left_bytes
        if before_s is None or not (took_s := now_s - before_s) > 0:
            return
        # Peers share the link and are seldom busy at the same moments: the time in which any of them is.
        idle = math.prod(1 - min(max(one - before.get(peer, one), 0.0) / took_s, 1.0) for peer, one in busy_s.items())
        self._total_s += (1 - idle) * took_s
        kept = math.exp(-took_s / _AVERAGED_S)
        self._carried = kept * self._carried + grown
        self._carrying_s = kept * self._carrying_s + (1 - idle) * took_s
        self._known_s = min(self._known_s + took_s, _AVERAGED_S)
        self._needed += (1 - idle - self._needed) * min(took_s / self._known_s, 1.0)

    def allowed(self, bandwidth: float, chunk_bytes: int, now_s: float, *, waits: bool) -> int:
        """Bytes that may leave now, while `share` is one: some of what has been saved up. bandwidth: as copies found
        it, which is too much where a little of them goes at once. waits: something of the exchange is on its way; then
        a chunk, only where nothing more can be saved."""
        rate = self._rate(bandwidth)
        most = max(_MAX_CREDIT_S * rate, _MIN_CREDIT_CHUNKS * chunk_bytes)
        if self._credit_s is not None:
            self._credit = min(self._credit + rate * (now_s - self._credit_s), most)
        self._credit_s = now_s
        if waits:
            return chunk_bytes if self._credit >= most else 0
        return int(self._credit)

    def missing_s(self, bandwidth: float, wanted_bytes: int) -> float:
        """Return the seconds until so many bytes have been saved up."""
        return max(wanted_bytes - self._credit, 0.0) / self._rate(bandwidth)

    def _rate(self, bandwidth: float) -> float:
        return (self.share or 1.0) * min(bandwidth, self.bandwidth)

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
        carried = round(arrived_bytes * min(busy_s / took_s, 1.0))
        self._carried += carried
        return busiest, carried


SETTLING_S: Final = 120.0
"""Seconds after a copy began in which its rate says little: the first plan may be on its way, and the exchange fills
the link."""
MIN_MEASURED_S: Final = 60.0
"""Seconds over which a rate is measured at least."""
REPORTED_FROM_S: Final = 300.0
"""Seconds of a copy from which on people are told."""


class CopyAge:
    """Age of one sender's copies, observed while they are under way. Reported once."""

    def __init__(self) -> None:
        self._told = False
        self._begun_s = 0.0
        self._settled = 0.0, 0  # when, and what had arrived then

    def begin(self, now_s: float) -> None:
        """The copies of a generation do."""
        self._begun_s = now_s
        self._settled = now_s, 0

    def observe(self, arrived_bytes: int, total_bytes: int, share: float, now_s: float) -> str | None:
        """Return a sentence for people, once. arrived_bytes: of this generation's copies, at holders. share: of the
        link."""
        if now_s - self._begun_s < SETTLING_S:
            self._settled = now_s, arrived_bytes
        since_s, before_bytes = self._settled
        if self._told or now_s - since_s < MIN_MEASURED_S or arrived_bytes <= before_bytes:
            return None
        copy_s = (now_s - since_s) * total_bytes / (arrived_bytes - before_bytes)
        if copy_s < REPORTED_FROM_S:
            return None
        self._told = True
        return (
            f"copies of this rank's state in other machines' memory take about {copy_s / 60:.0f} min each: "
            f"{naturalsize(total_bytes)} beside an exchange that needs the link, of which copies have "
            f"{100 * share:.0f} %. So what others hold is up to {2 * copy_s / 60:.0f} min old. Where that is too old, "
            "write to disk more often ([checkpoint] every_steps)"
        )
