"""Plans in words, for `atoll events`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_SHOWN: Final = 8


def percent(share: float) -> str:
    """'99.50'."""
    return f"{100 * share:.2f}"


def ratios(times: Sequence[float]) -> str:
    """Speeds against the fastest: '1.00 : 0.60'."""
    fastest = min(times)
    shown = " : ".join(f"{fastest / t:.2f}" for t in times[:_SHOWN])
    return shown + (f" : … ({len(times)} ranks)" if len(times) > _SHOWN else "")


def listed(batches: Sequence[int]) -> str:
    return "/".join(map(str, batches[:_SHOWN])) + ("/…" if len(batches) > _SHOWN else "")


def changed(name: str, before: object, after: object, unit: str = "") -> str:
    """'batch 137 → 240', or 'batch 137' where it stays."""
    return f"{name} {before}{unit}" if before == after else f"{name} {before} → {after}{unit}"


def mbit(bits_per_second: float) -> str:
    """'95' of Mbit/s, with a digit behind the point below 10."""
    value = bits_per_second / 1e6
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
