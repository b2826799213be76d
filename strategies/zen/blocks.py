"""A sparse tensor as its non-zero blocks of 256 entries, and back."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.strategies.zen.coordinates import F32, Coordinates, UnitShape

BLOCK_ENTRIES: Final = 256
"""As OmniReduce has them."""


def to_blocks(mine: Coordinates, shape: UnitShape) -> Coordinates:
    """Units ascend, here and there."""
    return _regrouped(mine, shape.width, BLOCK_ENTRIES)


def from_blocks(blocks: Coordinates, shape: UnitShape) -> Coordinates:
    """Units of which no entry is non-zero are none."""
    return _regrouped(blocks, BLOCK_ENTRIES, shape.width)


def block_count(mine: Coordinates) -> int:
    """Blocks that these units touch."""
    width = mine.values.shape[1]
    first = mine.unit.astype(np.int64) * width // BLOCK_ENTRIES
    last = (mine.unit.astype(np.int64) * width + width - 1) // BLOCK_ENTRIES
    if not len(first):
        return 0
    # Units ascend, so one touches again at most the block in which the one before ended.
    return int((last - first + 1).sum() - (first[1:] == last[:-1]).sum())


def _regrouped(mine: Coordinates, width: int, into: int) -> Coordinates:
    """Units of `into` entries that have a non-zero one, from units of `width`."""
    row_E, column_E = np.nonzero(mine.values)
    entry_E: NDArray[np.int64] = mine.unit[row_E].astype(np.int64) * width + column_E
    unit_E = entry_E // into
    new_E = np.diff(unit_E, prepend=-1) != 0
    values: F32 = np.zeros((int(new_E.sum()), into), np.float32)
    values[np.cumsum(new_E) - 1, entry_E % into] = mine.values[row_E, column_E]
    return Coordinates(unit_E[new_E].astype(np.uint32), values, mine.tally)
