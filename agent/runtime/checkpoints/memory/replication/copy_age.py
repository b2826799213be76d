"""Tells how old the copies in others' memory become, where they have a part of a link only. Pure."""

from __future__ import annotations

from typing import Final

from humanize import naturalsize

SETTLING_S: Final = 120.0
"""Seconds after a copy began in which its rate says little: the first plan may be on its way, and the exchange fills
the link."""
MIN_MEASURED_S: Final = 60.0
"""Seconds over which a rate is measured at least."""
REPORTED_FROM_S: Final = 300.0
"""Seconds of a copy from which on people are told."""


class CopyAge:
    """Age of one sender's copies, observed while they are under way. Reported once."""

    def __init__(self) -> None:
        self._told = False
        self._begun_s = 0.0
        self._settled = 0.0, 0  # when, and what had arrived then

    def begin(self, now_s: float) -> None:
        """The copies of a generation do."""
        self._begun_s = now_s
        self._settled = now_s, 0

    def observe(self, arrived_bytes: int, total_bytes: int, share: float, now_s: float) -> str | None:
        """Return a sentence for people, once. arrived_bytes: of this generation's copies, at holders. share: of the
        link."""
        if now_s - self._begun_s < SETTLING_S:
            self._settled = now_s, arrived_bytes
        since_s, before_bytes = self._settled
        if self._told or now_s - since_s < MIN_MEASURED_S or arrived_bytes <= before_bytes:
            return None
        copy_s = (now_s - since_s) * total_bytes / (arrived_bytes - before_bytes)
        if copy_s < REPORTED_FROM_S:
            return None
        self._told = True
        return (
            f"copies of this rank's state in other machines' memory take about {copy_s / 60:.0f} min each: "
            f"{naturalsize(total_bytes)} beside an exchange that needs the link, of which copies have "
            f"{100 * share:.0f} %. So what others hold is up to {2 * copy_s / 60:.0f} min old. Where that is too old, "
            "write to disk more often ([checkpoint] every_steps)"
        )
