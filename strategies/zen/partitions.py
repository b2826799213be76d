"""Partition a tensor's units among the ranks that serve: by hashing (Zen), or equal ranges (all others)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Protocol

import numpy as np

from atoll.errors import BadInput
from atoll.kernels import units
from atoll.strategies.zen.coordinates import U32, Coordinates, UnitShape, summed
from atoll.strategies.zen.messages import Members, bitmap_pays


class Partitions(Protocol):
    """Partition of one tensor."""

    @property
    def shape(self) -> UnitShape: ...

    def split(self, mine: Coordinates) -> list[Coordinates]:
        """Split coordinates into partitions. Counts of units are per partition; the first partition carries the other
        counts."""

    def listed(self, partition: int, count: int) -> U32 | None:
        """Return all units of a partition, ascending, for a message with so many of them; None: it has indices."""

    @property
    def members(self) -> Members | None:
        """Return a function that lists the units of a partition; None: messages have indices."""

    def sum(self, terms: Sequence[Coordinates], of_each: Sequence[int]) -> Coordinates:
        """Sum in the terms' order, each of the named partition. Raises BadInput for a unit of another one."""


class HashPartitions:
    """Partition by hashing (Zen): balanced whatever the units are (Theorem 3.2). The members of all partitions take 4
    bytes a unit, once the first message has a bitmap."""

    def __init__(self, shape: UnitShape, seeds: Sequence[int], count: int) -> None:
        self.shape, self._seeds, self._count = shape, seeds, count

    def split(self, mine: Coordinates) -> list[Coordinates]:
        order = np.empty(len(mine.unit), np.uint32)
        bounds = units.hierarchical_hash(mine.unit, self._seeds, self._count, order).bounds
        parts = [order[begin:end] for begin, end in pairwise(bounds)]
        return told([Coordinates(mine.unit[at], mine.values[at]) for at in parts], mine)

    @cached_property
    def _members(self) -> list[U32]:
        member = np.empty(self.shape.units, np.uint32)
        return [
            member[begin:end] for begin, end in pairwise(units.partition_members(self._seeds[0], self._count, member))
        ]

    def members(self, partition: int) -> U32:
        return self._members[partition]

    def listed(self, partition: int, count: int) -> U32 | None:
        """List the members only if a bitmap would be clearly shorter: for a table with 2^31 rows the list is 8 GB."""
        return self.members(partition) if bitmap_pays(count, 0.9 * self.shape.units / self._count) else None

    def sum(self, terms: Sequence[Coordinates], of_each: Sequence[int]) -> Coordinates:
        return summed(list(terms), self.shape, units.PartitionsOf(self._seeds[0], self._count, of_each))


class EvenPartitions:
    """Partition into equal ranges of units, good as long as they are equally dense."""

    members = None

    def __init__(self, shape: UnitShape, count: int) -> None:
        self.shape = shape
        self.bounds = [shape.units * number // count for number in range(count + 1)]

    def split(self, mine: Coordinates) -> list[Coordinates]:
        at = np.searchsorted(mine.unit, np.array(self.bounds, np.uint64)).tolist()
        return told([Coordinates(mine.unit[a:b], mine.values[a:b]) for a, b in pairwise(at)], mine)

    def listed(self, partition: int, count: int) -> None:
        return None

    def sum(self, terms: Sequence[Coordinates], of_each: Sequence[int]) -> Coordinates:
        for term, number in zip(terms, of_each, strict=True):
            begin, end = self.bounds[number], self.bounds[number + 1]
            if len(term.unit) and not (begin <= int(term.unit.min()) and int(term.unit.max()) < end):
                raise BadInput(f"it has a unit that is not of partition {number}, {begin} to {end - 1}")
        return summed(list(terms), self.shape)


def told(parts: list[Coordinates], mine: Coordinates) -> list[Coordinates]:
    """Return partitions with their tallies, which add up to that of all."""
    rest = replace(mine.tally, units=0, blocks=0, distinct=0)
    counted = [replace(rest, units=len(part.unit)) for part in parts]
    counted[0] = replace(counted[0], blocks=mine.tally.blocks, distinct=mine.tally.distinct)
    return [part.with_tally(tally) for part, tally in zip(parts, counted, strict=True)]


def hash_seeds(seed: int) -> tuple[int, ...]:
    """Return the seeds of h0 ... hk, derived from the run's."""
    digest = blake2b(seed.to_bytes(16, "little", signed=True), digest_size=4 * (units.SLOT_HASHES + 1)).digest()
    return struct.unpack(f"<{units.SLOT_HASHES + 1}I", digest)
