"""The input of estimators: what a link carried, free of how that was told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLink:
    """What one rank's connection to a peer carried since the run began: bytes, and seconds with bytes waiting to
    leave."""

    peer: int
    sent_bytes: int
    busy_s: float
