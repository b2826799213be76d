"""Ways to synchronise a group of tensors, generated from rules.

Source: Espresso (Wang, 2023), Section 4.3: compress or not, the device of each compression and decompression, flat or
hierarchical, indivisible or divisible. Rules prune the tree: a dimension that changes nothing has one value. A group
that is not compressed has no devices: it is all-reduced. A model that is trained on processors has one device:
compression is then in the backward pass's thread (`device`) or in the exchange's (`cpu`). The run's islands decide
between flat and hierarchical: if an island has several ranks, the leaders of islands exchange, since only they are
joined to other islands. An algorithm that takes whole tensors is indivisible."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, TypeAlias

from atoll.errors import BadInput

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
