"""Group tensors by simple rules: before a plan, and as baselines of planned groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from atoll.strategies.compressed.groups.options import TensorGroup, Way
from atoll.strategies.dense.pieces import FIRST_PIECE_BYTES, PIECE_BYTES

IN_THE_BACKWARD_PASS: Final = Way(compressed=True)
RULES: Final[Mapping[str, tuple[int, str]]] = {
    "none": (1 << 62, "nothing is compressed"),
    "all": (0, "everything is compressed, in the backward pass, everybody's to everybody"),
    "by-size": (65_536, "tensors of 64 KiB and more are compressed, as by `all`"),
}
"""Rules by name: the bytes from which on a gradient is compressed, and a description."""


def by_size(sizes: Sequence[int], min_bytes: int, way: Way = IN_THE_BACKWARD_PASS) -> list[TensorGroup]:
    """Group neighbours of one way up to the bytes that strategy `dense` sends at once; tensors of min_bytes and more
    are compressed.

    sizes: bytes of each tensor, in the order of the backward pass."""
    groups: list[TensorGroup] = []
    filled = 0  # bytes of the last group
    for index, size in enumerate(sizes):
        mine = way if size >= max(min_bytes, 1) else Way()
        limit = PIECE_BYTES if len(groups) > 1 else FIRST_PIECE_BYTES
        if groups and groups[-1].way == mine and filled < limit:
            groups[-1] = TensorGroup(groups[-1].begin, index + 1, mine)
            filled += size
        else:
            groups.append(TensorGroup(index, index + 1, mine))
            filled = size
    return groups
