"""Ways to synchronise a group of tensors, generated from rules, and groups by size.

Source: Espresso (Wang, 2023), Section 4.3: compress or not, the device of each compression and decompression, flat or
hierarchical, indivisible or divisible. Rules prune the tree: a dimension that changes nothing has one value. A group
that is not compressed has no devices: it is all-reduced. A model that is trained on processors has one device:
compression is then in the backward pass's thread (`device`) or in the exchange's (`cpu`). The run's islands decide
between flat and hierarchical: if an island has several ranks, the leaders of islands exchange, since only they are
joined to other islands. An algorithm that takes whole tensors is indivisible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, TypeAlias

from atoll.errors import BadInput
from atoll.strategies.dense.pieces import FIRST_PIECE_BYTES, PIECE_BYTES

Device: TypeAlias = Literal["device", "cpu"]
DEVICES: Final[tuple[Device, ...]] = ("device", "cpu")
ALLREDUCE: Final = "none"


@dataclass(frozen=True, slots=True)
class Way:
    """Way to synchronise a group. compress, decompress: device of each. divisible: each rank serves a range of the
    entries: it receives the range from every rank, and sends their sum, compressed again. Otherwise every rank receives
    every other's whole part."""

    compressed: bool = False
    compress: Device = "device"
    decompress: Device = "device"
    divisible: bool = False

    @property
    def name(self) -> str:
        if not self.compressed:
            return ALLREDUCE
        return f"{self.compress}/{self.decompress}/{'divisible' if self.divisible else 'indivisible'}"

    @property
    def words(self) -> str:
        """Description behind the algorithm's name, such as 'on CPU, divisible'."""
        where = {"device": "in the backward pass", "cpu": "on CPU"}[self.compress]
        return f"{where}, {'divisible' if self.divisible else 'indivisible'}"


def ways(*, divisible: bool = True) -> tuple[Way, ...]:
    """Return all ways. divisible: the algorithm can compress parts of a tensor."""
    every = product(DEVICES, DEVICES, (False, True) if divisible else (False,))
    return (Way(), *(Way(True, compress, decompress, split) for compress, decompress, split in every))


_BY_NAME: Final = {way.name: way for way in ways()}


def named(name: str) -> Way:
    """Return the way of this name. Raises BadInput."""
    if name not in _BY_NAME:
        raise BadInput(f"{name!r} is no way to synchronise a group. Known: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors [begin, end) in the order of the backward pass, compressed by one call and sent as one message."""

    begin: int
    end: int
    way: Way


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
