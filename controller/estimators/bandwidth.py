"""Estimate the bandwidth of links between islands from measured goodput and from the time that training waits.

Source: StellaTrain (Lim et al., 2024), section 4.2: a feedback loop over the idle rate of the devices. The paper says
that devices which idle for less than 5 % of the time show an overestimated bandwidth. It is the other way round: if no
device waits, the link may carry more. The loop only corrects, since bytes and busy time of every transfer are known. A
link that was busy nearly all the time shows its bandwidth. One that was not shows less: much of a short burst's busy
time is latency. Cut fast, raise slowly: too high an estimate makes every step wait, too low a one only compresses more
than necessary."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from atoll.controller.estimators.profile import LinkEstimate
from atoll.step_estimators.robust import median_error, spread
from atoll.telemetry.telemetry_limits import MAX_PEERS

INTERVAL_S: Final = 0.5
"""Seconds between reports that are merged."""
STALE_S: Final = 3.0
"""Seconds after which a rank's traffic is forgotten."""
MIN_BYTES: Final = 64 * 1024
"""Bytes of an interval below which it shows latency, not bandwidth; the same for a step without waiting."""
FORGET_LINK_S: Final = 10.0
"""Seconds after which a measurement leaves the median."""
SATURATED_BUSY_SHARE: Final = 0.8
"""Share of busy time from which the goodput is the link's bandwidth."""
LOADED_BUSY_SHARE: Final = 0.5
"""Share of busy time below which training does not wait for the link."""
MAX_WAITING_SHARE: Final = 0.05
"""Share of training's time that may be waiting before the estimate is cut."""
CUT_FACTOR: Final = 0.9
"""Smallest factor of one cut."""
RAISE_PER_S: Final = 0.15
"""Largest relative raise a second towards the measured goodput."""
PROBE_PER_S: Final = 0.02
"""Relative raise a second beyond the measured goodput while no rank waits."""
MAX_PROBE_FACTOR: Final = 1.5
"""Factor on the measured goodput up to which the estimate is raised."""
WINDOW_INTERVALS: Final = 8
"""Newest intervals whose median is the estimate's spread, and newest measurements of a path that count."""
FORGET_PATH_S: Final = 60.0
"""Seconds after which a path's measurement leaves the median."""
MAX_PATHS: Final = 4096

Path = tuple[str, str]
"""An island and the one it sends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLink:
    """Traffic of one rank's link to a peer since the run began: bytes, copies of checkpoints included, and seconds with
    bytes waiting to leave."""

    peer: int
    sent_bytes: int
    busy_s: float


_Counts = tuple[float, dict[int, ObservedLink]]
"""Time of a report, and the traffic of one rank to other islands since the run began, by peer."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Traffic of one rank to other islands in its newest interval. idle: share of it in which no bytes waited to
    leave."""

    now_s: float
    bps: float
    idle: float


class BandwidthEstimator:
    """Estimator of one run: the bandwidth from each island to the others. Bounded: two records a rank, WINDOW_INTERVALS
    numbers an island."""

    def __init__(self) -> None:
        self._counts: dict[int, _Counts] = {}
        self._sent: dict[str, dict[int, _Sent]] = {}
        self._links: dict[str, _Link] = {}

    def observe(
        self,
        rank: int,
        island_of: Mapping[int, str],
        links: Iterable[ObservedLink],
        now_s: float,
        *,
        stall_share: float,
        step_s: float = 0.0,
    ) -> None:
        """Add the traffic of one rank's connections until now_s.

        stall_share: share of the newest steps that the rank waited that waited least. Only what all ranks wait for is
        the network: faster ranks also wait for slower ones. step_s: seconds of the rank's newest steps; 0 if
        unknown."""
        island = island_of.get(rank)
        if island is None:
            return
        away = [link for link in links if _sound(link) and island_of.get(link.peer, island) != island][:MAX_PEERS]
        counts = now_s, {link.peer: link for link in away}
        before = self._counts.get(rank)
        if before is not None and 0 <= now_s - before[0] < INTERVAL_S:
            return
        self._counts[rank] = counts
        if before is None or not away or not (sent := _between(before, counts)):
            return
        ranks = self._sent.setdefault(island, {})
        ranks[rank] = sent
        current = [each for each in ranks.values() if now_s - each.now_s <= STALE_S]
        # Ranks and peers share the link and seldom send at the same moments: the time in which any of them sends.
        busy = 1 - math.prod(each.idle for each in current)
        bps = sum(each.bps for each in current)
        if bps * (now_s - before[0]) < 8 * MIN_BYTES or not busy > 0:
            return
        link = self._links.get(island)
        if link is None:
            link = self._links[island] = _Link(now_s)
        small = 0 < bps * step_s < 8 * MIN_BYTES
        link.observe(bps / busy, busy, stall_share, now_s, small=small)

    def estimates(self) -> dict[str, LinkEstimate]:
        return {island: link.estimate() for island, link in sorted(self._links.items())}


def _sound(link: ObservedLink) -> bool:
    return link.sent_bytes >= 0 and math.isfinite(link.busy_s) and link.busy_s >= 0


def _between(before: _Counts, after: _Counts) -> _Sent | None:
    """Return the traffic between two reports; None if a counter went back, since that connection began anew."""
    (before_s, links_before), (now_s, links) = before, after
    interval_s = now_s - before_s
    if not interval_s > 0:
        return None
    total, idle = 0, 1.0
    for peer, link in links.items():
        was = links_before.get(peer, ObservedLink(peer=peer, sent_bytes=0, busy_s=0.0))
        grown, busy_s = link.sent_bytes - was.sent_bytes, link.busy_s - was.busy_s
        if grown < 0 or busy_s < 0:
            return None
        total += grown
        idle *= 1 - min(busy_s / interval_s, 1.0)
    return _Sent(now_s, 8 * total / interval_s, idle)


class _Link:
    """Estimate of one island's link."""

    __slots__ = ("_bps", "_bursts", "_full", "_heard_s", "_known_s", "_saturated_bps", "_usual")

    def __init__(self, now_s: float) -> None:
        self._bps = 0.0
        self._saturated_bps = 0.0  # what it carried when last busy nearly all the time; 0 where it never was
        self._known_s = -math.inf  # since when that is known
        self._usual: tuple[float, float] | None = None  # goodput and busy share while not saturated
        self._heard_s = now_s
        # When, and goodput: of the newest intervals in which it was saturated, and in which it was not.
        self._full: deque[tuple[float, float]] = deque(maxlen=WINDOW_INTERVALS)
        self._bursts: deque[tuple[float, float]] = deque(maxlen=WINDOW_INTERVALS)

    def observe(self, goodput_bps: float, busy: float, stall_share: float, now_s: float, *, small: bool) -> None:
        """Add one interval: bits a second while busy, and the share of it that the link was busy. small: a step sends
        so little that its busy time shows latency or a busy processor."""
        elapsed_s = max(now_s - self._heard_s, 0.0)
        self._heard_s = now_s
        measured = self._full if busy >= SATURATED_BUSY_SHARE else self._bursts
        if measured and now_s - measured[-1][0] > FORGET_LINK_S:
            measured.clear()
        measured.append((now_s, goodput_bps))
        newest_bps = median([bps for _, bps in list(measured)[-3:]])
        if self._bps == 0:
            self._bps = goodput_bps
        if small and (stall_share < MAX_WAITING_SHARE or busy < SATURATED_BUSY_SHARE):
            self._raise(newest_bps, busy, elapsed_s, nobody_waits=stall_share < MAX_WAITING_SHARE)
        elif busy >= SATURATED_BUSY_SHARE:
            self._saturate(newest_bps, elapsed_s, now_s)
        elif stall_share >= MAX_WAITING_SHARE and busy >= LOADED_BUSY_SHARE:
            self._bps = min(self._bps, max(self._bps * CUT_FACTOR, newest_bps * busy))
        else:
            self._compare(newest_bps, busy)
            self._raise(newest_bps, busy, elapsed_s, nobody_waits=stall_share < MAX_WAITING_SHARE)

    def _saturate(self, newest_bps: float, elapsed_s: float, now_s: float) -> None:
        self._saturated_bps, self._known_s, self._usual = newest_bps, now_s, None
        if newest_bps < 0.8 * self._bps:
            while len(self._full) > 2:  # the rest is of before
                self._full.popleft()
        self._bps = min(newest_bps, self._bps * (1 + RAISE_PER_S) ** elapsed_s)

    def _compare(self, newest_bps: float, busy: float) -> None:
        """Lower the estimate of a link that was never saturated if its bursts take longer than before: it became
        thinner."""
        if self._usual is None:
            self._usual = (newest_bps, busy)
            return
        usual_bps, usual_busy = self._usual
        if newest_bps < 0.7 * usual_bps and busy >= usual_busy:
            thinner = newest_bps / usual_bps
            self._bps, self._saturated_bps = self._bps * thinner, self._saturated_bps * thinner
            self._usual = (newest_bps, busy)
            return
        self._usual = (usual_bps + 0.1 * (newest_bps - usual_bps), usual_busy + 0.1 * (busy - usual_busy))

    def _raise(self, newest_bps: float, busy: float, elapsed_s: float, *, nobody_waits: bool) -> None:
        if newest_bps > self._bps:
            self._bps = min(newest_bps, self._bps * (1 + RAISE_PER_S) ** elapsed_s)
        elif nobody_waits:
            most = max(self._saturated_bps, newest_bps) * (MAX_PROBE_FACTOR if busy < LOADED_BUSY_SHARE else 1.0)
            self._bps = max(self._bps, min(most, self._bps * (1 + PROBE_PER_S) ** elapsed_s))

    def estimate(self) -> LinkEstimate:
        newest = [bps for _, bps in self._full or self._bursts]
        centre = median(newest)
        error = max(median_error(spread(newest, centre), len(newest)) / centre, 0.02)
        # What a saturated link told is sure for some minutes; a link that never was one is guessed.
        aged = 0.01 * math.sqrt(self._heard_s - self._known_s) if self._saturated_bps > 0 else 0.3
        return LinkEstimate(bandwidth_bps=self._bps, error=math.hypot(error, aged))


class PathEstimator:
    """Estimator of the bandwidth between each two islands of a run. The thinnest of an island's peers holds up all its
    sending, so the island's own link does not show whose link is thin: pairs do.

    Bounded: MAX_PATHS windows, MAX_PEERS counts a rank."""

    def __init__(self) -> None:
        self._counted: dict[int, dict[int, ObservedLink]] = {}  # by rank and peer, when last looked at
        self._seen: dict[Path, deque[tuple[float, float]]] = {}  # when, and bits a second while busy
        self._now_s = -math.inf

    def observe(self, rank: int, island_of: Mapping[int, str], links: Iterable[ObservedLink], now_s: float) -> None:
        """Add the traffic of one rank's connections from the run's beginning until now_s."""
        self._now_s = max(self._now_s, now_s)
        counted = self._counted.setdefault(rank, {})
        for link in links:
            before = counted.get(link.peer)
            if before is None or link.sent_bytes < before.sent_bytes or link.busy_s < before.busy_s:
                if before is not None or len(counted) < MAX_PEERS:
                    counted[link.peer] = link  # a connection that is new, or began anew
                continue
            grown, busy_s = link.sent_bytes - before.sent_bytes, link.busy_s - before.busy_s
            if grown < MIN_BYTES or not 0 < busy_s < math.inf:
                continue
            counted[link.peer] = link
            path = island_of.get(rank, ""), island_of.get(link.peer, "")
            if "" not in path and path[0] != path[1] and (path in self._seen or len(self._seen) < MAX_PATHS):
                self._seen.setdefault(path, deque(maxlen=WINDOW_INTERVALS)).append((now_s, 8 * grown / busy_s))

    def estimates(self) -> dict[Path, float]:
        """Return the bits a second of paths with recent traffic."""
        since_s = self._now_s - FORGET_PATH_S
        newest = {path: [bps for at_s, bps in seen if at_s >= since_s] for path, seen in self._seen.items()}
        return {path: median(bps) for path, bps in sorted(newest.items()) if bps}
