"""Line of `atoll status` about strategy `compressed`."""

from __future__ import annotations

from humanize import naturalsize

from atoll.strategies.compressed.plan import CompressedPlan
from atoll.strategies.compressed.settings import WORDS, Compressed
from atoll.strategies.declaration import Shown


def status(shown: Shown) -> list[str]:
    """Return for example 'DGC', '12 of 31 groups compressed', '2.1 % of the bytes', '0.84 MB sent in a step'."""
    assert isinstance(shown.settings, Compressed)
    parts = [WORDS[shown.settings.algorithm]]
    groups = shown.planned.as_groups() if isinstance(shown.planned, CompressedPlan) else None
    if groups:
        parts.append(f"{sum(group.way.compressed for group in groups)} of {len(groups)} groups compressed")
    if not shown.metrics:
        return parts
    return [
        *parts,
        f"{100 * shown.metrics.get('compression', 1.0):.1f} % of the bytes",
        f"{naturalsize(shown.metrics.get('sent_bytes', 0.0))} sent in a step",
    ]
