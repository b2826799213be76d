"""Convert a sparse tensor to its non-zero blocks of 256 entries, and back."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.strategies.zen.coordinates import F32, Coordinates, UnitShape

BLOCK_ENTRIES: Final = 256
"""Entries of a block, as in OmniReduce."""


def to_blocks(mine: Coordinates, shape: UnitShape) -> Coordinates:
    """Convert units to blocks; both ascend."""
    return _regrouped(mine, shape.width, BLOCK_ENTRIES)


def from_blocks(blocks: Coordinates, shape: UnitShape) -> Coordinates:
    """Convert blocks to units; units without a non-zero entry are left out."""
    return _regrouped(blocks, BLOCK_ENTRIES, shape.width)


def block_count(mine: Coordinates) -> int:
    """Return the blocks that these units touch."""
    width = mine.values.shape[1]
    first = mine.unit.astype(np.int64) * width // BLOCK_ENTRIES
    last = (mine.unit.astype(np.int64) * width + width - 1) // BLOCK_ENTRIES
    if not len(first):
        return 0
    # Units ascend, so one touches again at most the block in which the one before ended.
    return int((last - first + 1).sum() - (first[1:] == last[:-1]).sum())


def _regrouped(mine: Coordinates, width: int, into: int) -> Coordinates:
    """Return the units of `into` entries with a non-zero entry, from units of `width`."""
    row_E, column_E = np.nonzero(mine.values)
    entry_E: NDArray[np.int64] = mine.unit[row_E].astype(np.int64) * width + column_E
    unit_E = entry_E // into
    new_E = np.diff(unit_E, prepend=-1) != 0
    values: F32 = np.zeros((int(new_E.sum()), into), np.float32)
    values[np.cumsum(new_E) - 1, entry_E % into] = mine.values[row_E, column_E]
    return Coordinates(unit_E[new_E].astype(np.uint32), values, mine.tally)
