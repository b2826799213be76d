"""Input of estimators: traffic of a link, independent of the wire format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLink:
    """Traffic of one rank's link to a peer since the run began: bytes, copies of checkpoints included, and seconds with
    bytes waiting to leave."""

    peer: int
    sent_bytes: int
    busy_s: float
