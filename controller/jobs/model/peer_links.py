"""Links between nodes, as their agents measured them: the newest measurement of each pair and direction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high
from typing import Final

FRESH_S: Final = 30.0
"""Seconds before the newest measurement between two groups of nodes in which others count beside it."""


@dataclass(frozen=True, slots=True)
class PeerLink:
    """One direction of a link: round-trip time, bits a second towards the other node, and the wall clock of the
    measurement, which is only shown."""

    rtt_s: float
    bandwidth_bps: float
    measured_unix_s: float


@dataclass(frozen=True, slots=True)
class PeerLinks:
    """Newest measurement by sending and receiving node."""

    measured: Mapping[tuple[str, str], PeerLink] = field(default_factory=dict)

    def between(self, nodes_a: Collection[str], nodes_b: Collection[str]) -> PeerLink | None:
        """Return the link from nodes a to nodes b: of the newest pairs the higher median of the bandwidths, the median
        round trip, and the time of the newest. None if no pair is measured."""
        pairs = ((a, b) for a in nodes_a for b in nodes_b if a != b)
        return _link_of([self.measured[pair] for pair in pairs if pair in self.measured])

    def by_island(self, island_of: Mapping[str, str]) -> dict[tuple[str, str], PeerLink]:
        """Return the links within and between the islands of these nodes, as `between` does for two of them."""
        found: dict[tuple[str, str], list[PeerLink]] = {}
        for (a, b), link in self.measured.items():
            if a in island_of and b in island_of:
                found.setdefault((island_of[a], island_of[b]), []).append(link)
        joined = {pair: _link_of(links) for pair, links in found.items()}
        return {pair: link for pair, link in joined.items() if link is not None}


def _link_of(found: Sequence[PeerLink]) -> PeerLink | None:
    """Return one link of several pairs. Pairs that were measured at once shared the link, so the higher median counts:
    of those measured about when the newest was, as a link may have fallen since the others."""
    newest_unix_s = max((link.measured_unix_s for link in found), default=0.0)
    fresh = [link for link in found if link.measured_unix_s >= newest_unix_s - FRESH_S]
    if not fresh:
        return None
    return PeerLink(
        rtt_s=median(link.rtt_s for link in fresh),
        bandwidth_bps=median_high(link.bandwidth_bps for link in fresh),
        measured_unix_s=newest_unix_s,
    )
