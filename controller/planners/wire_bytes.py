"""What a sparse step puts on the links between islands: values, indices and copies.

Of the entries that a step keeps, each rank selects its even part; the parts of an island travel as one sum, from its
leader to every other leader. A link is full duplex: it carries what its island sends beside what it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.controller.planners.water_filling import F64

BLOCK_ENTRIES: Final = 16
"""Entries that share an index."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """entries: of the model. value_bytes: of one on the wire. part_J: each island's share of what is kept; an island
    without devices has none of it and no traffic. bandwidth_J: bytes a second, each way."""

    entries: int
    value_bytes: int
    part_J: F64
    bandwidth_J: F64

    def seconds(self, kept: float) -> float:
        """Seconds that the slowest link needs for a step that keeps this share of all entries; 0 for one island."""
        return float((np.maximum(*self.carried(kept)) / self.bandwidth_J).max())

    def carried(self, kept: float) -> tuple[F64, F64]:
        """Bytes that each island sends, and those it receives, in a step that keeps this share of all entries."""
        density_J = kept * self.part_J
        sum_J = self.entries * density_J * (self.value_bytes + index_bytes(density_J) / BLOCK_ENTRIES)
        there_J = self.part_J > 0
        return (np.count_nonzero(there_J) - 1) * sum_J, there_J * (sum_J.sum() - sum_J)

    def kept_within(self, seconds: float) -> float:
        """The largest share of entries that every link carries in this time, to 1e-9 below; 1 where all fit."""
        if self.seconds(1.0) <= seconds:
            return 1.0
        # Time is nearly proportional to what is kept: bytes an entry change by 1 % where the share changes by half, so
        # each round is closer by a factor of fifty and more.
        kept, before = 1.0, 0.0
        while abs(kept - before) > 1e-11 * kept:
            kept, before = min(1.0, kept * seconds / self.seconds(kept)), kept
        return kept * (1 - 1e-9)


def index_bytes(density: F64) -> F64:
    """Bytes of an index as the gap to the one before, 7 bits a byte, for blocks kept at random with this density.

    A gap reaches 2^7 with probability (1 - density)^(2^7), and so on.
    """
    found: F64 = np.ones_like(density)
    longer: F64 = 1 - density
    for _ in range(3):
        for _ in range(7):
            longer = longer * longer  # a power's last bit would depend on the CPU, and recorded plans on it
        found += longer
    return found
