"""The sizes of the pieces in which gradients are all-reduced."""

from __future__ import annotations

from typing import Final

MIB: Final = 1024 * 1024
# The gradients that come first leave first: a small piece starts the network early. The rest are large enough for a
# thin link's bandwidth. Both as DDP does, so that comparisons compare the same thing.
FIRST_PIECE_BYTES: Final = 1 * MIB
PIECE_BYTES: Final = 25 * MIB
