"""The line of `atoll status` about strategy `volunteer`."""

from __future__ import annotations

from atoll.strategies.declaration import Shown


def status(shown: Shown) -> list[str]:
    """'3 volunteers', where any do '1 waits', '62 % of the samples by them', '120 tasks answered', '2 returned to the
    pool', '1 dropped late', and where there were any '4 messages refused'."""
    if not (found := shown.metrics):
        return []
    names = ("volunteers", "waiting", "answered", "returned", "late", "refused")
    counts = {name: round(found.get(name, 0.0)) for name in names}
    return [
        f"{counts['volunteers']} volunteer{'' if counts['volunteers'] == 1 else 's'}",
        *([f"{counts['waiting']} wait{'s' if counts['waiting'] == 1 else ''}"] if counts["waiting"] else []),
        f"{100 * found.get('volunteers_share', 0.0):.0f} % of the samples by them",
        f"{counts['answered']} tasks answered",
        f"{counts['returned']} returned to the pool",
        f"{counts['late']} dropped late",
        *([f"{counts['refused']} messages refused"] if counts["refused"] else []),
    ]
