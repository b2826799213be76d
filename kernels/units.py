"""Sparse tensors in coordinate form (COO): split by hashing, their units as a bitmap, and their sums.

A unit is a row of `width` neighbouring entries (of an embedding, say), or a single one. unit: uint32 or int32 [K], the
numbers of the units that are there, each once; values: float32 [K, width]. All are on the CPU, where messages are made
and read: there is no twin for CUDA devices. Whatever does not fit raises `BadInput`.

Source: Zen (Wang et al., 2023): hierarchical hashing is Algorithm 3.2, the hash bitmap Algorithm 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.kernels import _native
from atoll.kernels.refusals import refusals

SLOT_HASHES: Final = 3
"""k of Algorithm 3.2: so many places are tried for a unit before it goes to its partition's serial memory."""


class Hashed(NamedTuple):
    """order[bounds[p]] ... order[bounds[p + 1] - 1] are the places of partition p's units among those given. serial:
    units that found no slot."""

    bounds: list[int]
    serial: int


class PartitionsOf(NamedTuple):
    """Of `number` partitions, by the hash of this seed, the one that each term's units are of."""

    seed: int
    number: int
    of_each: Sequence[int]


def hierarchical_hash(unit: Any, seeds: Sequence[int], partitions: int, order: Any, threads: int = 0) -> Hashed:
    """Split units into partitions by MurmurHash3: balanced whatever the units are, and the same on every rank.

    seeds: SLOT_HASHES + 1 of them, each below 2^32; the first alone decides on the partition. order: uint32 or int32
    [K], overwritten by a permutation of 0 ... K - 1, grouped by partition; within one in no particular order, which may
    differ from call to call. No unit is ever lost.
    """
    with refusals("hierarchical_hash"):
        return Hashed(*_native.hierarchical_hash(unit, list(seeds), partitions, order, 0, threads))


def partition_members(seed: int, partitions: int, member: Any) -> list[int]:
    """The units of each partition: member, uint32 or int32 [units], becomes every unit below its length, grouped by
    partition and then ascending. Returns the bounds, as of `Hashed`."""
    with refusals("partition_members"):
        return _native.partition_members(seed, partitions, member)


def bitmap_bytes(members: int) -> int:
    """Of the bitmap of a partition with so many members."""
    return (members + 7) // 8


def bitmap_encode(member: Any, unit: Any, bitmap: Any) -> None:
    """bitmap, uint8 [bitmap_bytes(members)]: bit i of byte j says whether member[8 j + i] is in `unit`.

    member, unit: ascending, and every unit is a member.
    """
    with refusals("bitmap_encode"):
        _native.bitmap_encode(member, unit, bitmap)


def bitmap_decode(member: Any, bitmap: Any, unit: Any) -> None:
    """The inverse. unit: as many entries as bits are set, overwritten, ascending."""
    with refusals("bitmap_decode"):
        _native.bitmap_decode(member, bitmap, unit)


def sum_coordinates(
    terms: Sequence[tuple[Any, Any]], units: int, width: int, partitions: PartitionsOf | None = None, threads: int = 0
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The units that any term has, ascending, and their values' sums, added in the terms' order.

    terms: (unit, values) each, on the CPU; the units of one in any order. units: every unit is below. partitions:
    units of another than their term's are refused. The bits are those of the same sums in NumPy, for every number of
    threads; NaN and infinities propagate as IEEE 754 says.
    """
    with refusals("sum_coordinates"):
        of = partitions or PartitionsOf(0, 0, ())
        return _native.sum_coordinates(list(terms), units, width, of.seed, of.number, of.of_each, threads)


class Rows(NamedTuple):
    """Row k of the values is row reference[k] of those that are distinct, which are first found at first[0], ..."""

    reference: NDArray[np.uint32]
    first: NDArray[np.uint32]


def distinct_rows(values: NDArray[np.float32]) -> Rows:
    """Which rows of values, float32 [K, width], have the same bits. Where of the first thousand hardly one is there
    twice, it looks no further, and none is said to be."""
    reference, first = np.empty(len(values), np.uint32), np.empty(len(values), np.uint32)
    with refusals("distinct_rows"):
        found = _native.distinct_rows(values, values.shape[1], reference, first)
    return Rows(reference, first[:found])


def nonzero_units(dense: Any, width: int, threads: int = 0) -> NDArray[np.uint32]:
    """The units of which an entry is not zero, ascending; -0.0 is zero, NaN is not. dense: float32 on the CPU."""
    with refusals("nonzero_units"):
        return _native.nonzero_units(dense, width, threads)
