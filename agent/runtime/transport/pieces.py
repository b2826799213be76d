"""Cuts something large into what the thinnest link carries in about a second. So a deadline is for a piece, and who
waits sees that it moves."""

from __future__ import annotations

from typing import Final

FIRST_BYTES: Final = 256 * 1024
MOST_BYTES: Final = 64 * 1024 * 1024
SHORT_S: Final = 0.5
LONG_S: Final = 2.0


class Pieces:
    """The same on all who take part."""

    def __init__(self) -> None:
        self.bytes = FIRST_BYTES
        """Of the next."""

    def took(self, seconds: float) -> None:
        """The last one, on the slowest of them."""
        if seconds < SHORT_S:
            self.bytes = min(2 * self.bytes, MOST_BYTES)
        elif seconds > LONG_S:
            self.bytes = max(self.bytes // 2, FIRST_BYTES)
