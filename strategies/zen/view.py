"""Line of `atoll status` about strategy `zen`."""

from __future__ import annotations

from humanize import naturalsize

from atoll.strategies.declaration import Shown
from atoll.strategies.zen.settings import Zen


def status(shown: Shown) -> list[str]:
    """Return for example 'scheme auto', 'density 1.20 % of a worker, 3.10 % of all', '1.9 MB sent in a step'."""
    assert isinstance(shown.settings, Zen)
    parts = [f"scheme {shown.settings.scheme}"]
    if not shown.metrics:
        return parts
    own, of_all = (100 * shown.metrics.get(name, 0.0) for name in ("density", "density_of_all"))
    return [
        *parts,
        f"density {own:.2f} % of a worker, {of_all:.2f} % of all",
        f"{naturalsize(shown.metrics.get('sent_bytes', 0.0))} sent in a step",
    ]
