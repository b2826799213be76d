"""The line of `atoll status` about strategy `groups`."""

from __future__ import annotations

from humanize import naturalsize

from atoll.strategies.declaration import Shown
from atoll.strategies.groups.settings import Groups


def status(shown: Shown) -> list[str]:
    """'2 stages', 'grouping scheduled', 'groups of 75 % of the replicas', 'waiting 3.1 %', 'bubbles 21 %', '0.4 s
    without an average', '0.2 % apart', '1.9 MB sent in a round'; of one stage without stages and bubbles."""
    assert isinstance(shown.settings, Groups)
    stages = shown.settings.stages
    parts = [*([f"{stages} stages"] if stages > 1 else []), f"grouping {shown.settings.grouping}"]
    if not shown.metrics:
        return parts
    return [
        *parts,
        f"groups of {100 * shown.metrics.get('group_share', 0.0):.0f} % of the replicas",
        f"waiting {100 * shown.metrics.get('wait_share', 0.0):.1f} %",
        *([f"bubbles {100 * shown.metrics.get('bubble_share', 0.0):.0f} %"] if stages > 1 else []),
        f"{shown.metrics.get('unaveraged_s', 0.0):.1f} s without an average",
        f"{100 * shown.metrics.get('disagreement', 0.0):.1f} % apart",
        f"{naturalsize(shown.metrics.get('sent_bytes', 0.0))} sent in a round",
    ]
