"""The input of estimators: what a link carried, free of how that was told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLink:
    """What one rank's link carried since the run began while its connection to a peer was busy: bytes, those of copies
    of checkpoints included, and seconds with bytes waiting to leave."""

    peer: int
    sent_bytes: int
    busy_s: float
