"""Estimate the bandwidth between two islands. The thinnest of an island's peers holds up all its sending, so the
island's own link (`bandwidth`) does not show whose link is thin: pairs do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from atoll.controller.estimators.observed import ObservedLink
from atoll.step_estimators.robust import median
from atoll.telemetry.telemetry_limits import MAX_PEERS

MIN_BYTES: Final = 64 * 1024
"""Bytes below which a measurement shows latency, not bandwidth."""
WINDOW: Final = 8
FORGET_S: Final = 60.0
MAX_PATHS: Final = 4096

Path = tuple[str, str]
"""An island and the one it sends to."""


class PathEstimator:
    """Estimator of one run. Bounded: MAX_PATHS windows, MAX_PEERS counts a rank."""

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
                self._seen.setdefault(path, deque(maxlen=WINDOW)).append((now_s, 8 * grown / busy_s))

    def estimates(self) -> dict[Path, float]:
        """Return the bits a second of paths with recent traffic."""
        since_s = self._now_s - FORGET_S
        newest = {path: [bps for at_s, bps in seen if at_s >= since_s] for path, seen in self._seen.items()}
        return {path: median(bps) for path, bps in sorted(newest.items()) if bps}
