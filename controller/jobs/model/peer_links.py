"""Links between nodes, as their agents measured them: the newest measurement of each pair and direction."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
        found = [self.measured[a, b] for a in nodes_a for b in nodes_b if a != b and (a, b) in self.measured]
        if not found:
            return None
        return PeerLink(
            rtt_s=median(link.rtt_s for link in found),
            bandwidth_bps=median(link.bandwidth_bps for link in found),
            measured_unix_s=max(link.measured_unix_s for link in found),
        )
