"""Words of plans, for `atoll events`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_SHOWN: Final = 8


def percent(share: float) -> str:
    """Format a share as '99.50'."""
    return f"{100 * share:.2f}"


def ratios(times: Sequence[float]) -> str:
    """Format speeds relative to the fastest: '1.00 : 0.60'."""
    fastest = min(times)
    shown = " : ".join(f"{fastest / t:.2f}" for t in times[:_SHOWN])
    return shown + (f" : … ({len(times)} ranks)" if len(times) > _SHOWN else "")


def listed(batches: Sequence[int]) -> str:
    return "/".join(map(str, batches[:_SHOWN])) + ("/…" if len(batches) > _SHOWN else "")


def changed(name: str, before: object, after: object, unit: str = "") -> str:
    """Format a change: 'batch 137 → 240', or 'batch 137' if it stays."""
    return f"{name} {before}{unit}" if before == after else f"{name} {before} → {after}{unit}"


def mbit(bits_per_second: float) -> str:
    """Format a bandwidth in Mbit/s: '95', with a decimal below 10."""
    value = bits_per_second / 1e6
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
