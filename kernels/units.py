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
"""k of Algorithm 3.2: slots that are tried for a unit before it goes to its partition's serial memory."""


class Hashed(NamedTuple):
    """Units split into partitions: order[bounds[p]] ... order[bounds[p + 1] - 1] are the places of partition p's units
    in the input. serial: number of units that found no slot."""

    bounds: list[int]
    serial: int


class PartitionsOf(NamedTuple):
    """Partitions by the hash of this seed, `number` of them. of_each: the partition of each term's units."""

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
    """List the units of each partition.

    member: uint32 or int32 [units], becomes every unit below its length, grouped by partition and then ascending.
    Return the bounds, as of `Hashed`."""
    with refusals("partition_members"):
        return _native.partition_members(seed, partitions, member)


def bitmap_bytes(members: int) -> int:
    """Return the bytes of the bitmap of a partition with so many members."""
    return (members + 7) // 8


def bitmap_encode(member: Any, unit: Any, bitmap: Any) -> None:
    """Encode units as a bitmap: bit i of byte j is set if member[8 j + i] is in `unit`.

    bitmap: uint8 [bitmap_bytes(members)]. member, unit: ascending, and every unit is a member."""
    with refusals("bitmap_encode"):
        _native.bitmap_encode(member, unit, bitmap)


def bitmap_decode(member: Any, bitmap: Any, unit: Any) -> None:
    """Decode a bitmap. unit: as many entries as bits are set, overwritten, ascending."""
    with refusals("bitmap_decode"):
        _native.bitmap_decode(member, bitmap, unit)


def sum_coordinates(
    terms: Sequence[tuple[Any, Any]], units: int, width: int, partitions: PartitionsOf | None = None, threads: int = 0
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Return the units that any term has, ascending, and the sums of their values, added in the terms' order.

    terms: (unit, values) each, on the CPU; a term's units in any order. units: every unit is below. partitions: a unit
    outside its term's partition is refused. The bits are those of the same sums in NumPy, for every number of threads;
    NaN and infinities propagate as IEEE 754 says."""
    with refusals("sum_coordinates"):
        of = partitions or PartitionsOf(0, 0, ())
        return _native.sum_coordinates(list(terms), units, width, of.seed, of.number, of.of_each, threads)


class Rows(NamedTuple):
    """Distinct rows: row k of the values is row reference[k] of the distinct ones, which are rows first[0], first[1],
    ..."""

    reference: NDArray[np.uint32]
    first: NDArray[np.uint32]


def distinct_rows(values: NDArray[np.float32]) -> Rows:
    """Find rows of values, float32 [K, width], with the same bits. If hardly any of the first thousand repeats, stop
    and report all rows as distinct."""
    reference, first = np.empty(len(values), np.uint32), np.empty(len(values), np.uint32)
    with refusals("distinct_rows"):
        found = _native.distinct_rows(values, values.shape[1], reference, first)
    return Rows(reference, first[:found])


def nonzero_units(dense: Any, width: int, threads: int = 0) -> NDArray[np.uint32]:
    """Return the units with an entry that is not zero, ascending; -0.0 is zero, NaN is not. dense: float32 on the
    CPU."""
    with refusals("nonzero_units"):
        return _native.nonzero_units(dense, width, threads)
