"""Links between nodes, as their agents measured them: the newest measurement of each pair and direction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


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
        """Return the link from nodes a to nodes b: medians over the measured pairs, and the time of the newest. None if
        no pair is measured."""
        pairs = ((a, b) for a in nodes_a for b in nodes_b if a != b)
        return _median([self.measured[pair] for pair in pairs if pair in self.measured])

    def by_island(self, island_of: Mapping[str, str]) -> dict[tuple[str, str], PeerLink]:
        """Return the links within and between the islands of these nodes, as `between` does for two of them."""
        found: dict[tuple[str, str], list[PeerLink]] = {}
        for (a, b), link in self.measured.items():
            if a in island_of and b in island_of:
                found.setdefault((island_of[a], island_of[b]), []).append(link)
        medians = {pair: _median(links) for pair, links in found.items()}
        return {pair: link for pair, link in medians.items() if link is not None}


def _median(found: Sequence[PeerLink]) -> PeerLink | None:
    if not found:
        return None
    return PeerLink(
        rtt_s=median(link.rtt_s for link in found),
        bandwidth_bps=median(link.bandwidth_bps for link in found),
        measured_unix_s=max(link.measured_unix_s for link in found),
    )
