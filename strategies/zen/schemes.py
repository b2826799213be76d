"""Schemes by which ranks sum a sparse tensor: which rank sends what to which, and what it waits for.

Each is a generator: it posts messages, yields the messages that it waits for, is sent those, and returns the sum, the
same on every rank. Sources: Zen (Wang et al., 2023), Table 3.2 and section 3.2.5; SparCML (Renggli et al., 2019);
OmniReduce (Fei et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from atoll.errors import BadInput
from atoll.kernels import units
from atoll.planning.sparse_scheme import Scheme
from atoll.strategies.staged_sums.exchange import Post, Steps
from atoll.strategies.staged_sums.mailbox import Awaited, Message
from atoll.strategies.zen.blocks import BLOCK_ENTRIES, from_blocks, to_blocks
from atoll.strategies.zen.coordinates import Coordinates, UnitShape, summed, total
from atoll.strategies.zen.messages import Members, decode, encode
from atoll.strategies.zen.partitions import EvenPartitions, HashPartitions, Partitions

Summing: TypeAlias = Steps[Coordinates]


@dataclass(frozen=True, slots=True)
class Circle:
    """Ranks that take part in a sum, ascending. me: this rank's place among them."""

    ranks: tuple[int, ...]
    me: int
    post: Post

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def others(self) -> tuple[int, ...]:
        """Return the places of all other ranks."""
        return tuple(place for place in range(self.size) if place != self.me)

    def send(self, place: int, stage: int, message: memoryview) -> None:
        self.post(self.ranks[place], stage, message)

    def awaited(self, stage: int, places: Sequence[int]) -> Awaited:
        return Awaited(stage, tuple(self.ranks[place] for place in places))

    def read(
        self, place: int, message: Message, shape: UnitShape, partition: int, of: Members | None = None
    ) -> Coordinates:
        """Decode a message of a rank. Raises BadInput naming the rank."""
        try:
            return decode(message, shape, partition, of)
        except BadInput as error:
            raise BadInput(f"rank {self.ranks[place]} sent a message that cannot be: {error}") from error


class SchemeOf(Protocol):
    """Sum of a tensor over the ranks of a circle. hashed: its partitions by hashing."""

    def __call__(self, circle: Circle, shape: UnitShape, hashed: HashPartitions, mine: Coordinates) -> Summing: ...


FIRST_STAGE: Final = 2
"""First stage of this sum; earlier stages are of the sum within an island."""
_FIRST, _SECOND = FIRST_STAGE, FIRST_STAGE + 1


def stages_among(ranks: int) -> int:
    """Return the most stages of a sum of so many ranks, those within islands included: a ring has the most."""
    return FIRST_STAGE + 2 * max(ranks, 2)


def served(circle: Circle, split: Partitions, mine: Coordinates) -> Summing:
    """Sum point to point, in one shot: every rank pushes each partition to its server. The server sums in the order of
    ranks, and all pull the sum from it."""
    me, parts = circle.me, split.split(mine)
    for place in circle.others:
        member = split.listed(place, len(parts[place].unit))
        circle.send(place, _FIRST, encode(parts[place], split.shape, place, member))
    pushed = dict(zip(circle.others, (yield circle.awaited(_FIRST, circle.others)), strict=True))
    terms = [
        parts[me] if place == me else circle.read(place, pushed[place], split.shape, me, split.members)
        for place in range(circle.size)
    ]
    own = split.sum(terms, [me] * circle.size)
    message = encode(own, split.shape, me, split.listed(me, len(own.unit)))
    for place in circle.others:
        circle.send(place, _SECOND, message)
    pulled = dict(zip(circle.others, (yield circle.awaited(_SECOND, circle.others)), strict=True))
    sums = [
        own if place == me else circle.read(place, pulled[place], split.shape, place, split.members)
        for place in range(circle.size)
    ]
    return split.sum(sums, range(circle.size))


def zen(circle: Circle, shape: UnitShape, hashed: HashPartitions, mine: Coordinates) -> Summing:
    return served(circle, hashed, mine)


def sparse_ps(circle: Circle, shape: UnitShape, hashed: HashPartitions, mine: Coordinates) -> Summing:
    return served(circle, EvenPartitions(shape, circle.size), mine)


def omnireduce(circle: Circle, shape: UnitShape, hashed: HashPartitions, mine: Coordinates) -> Summing:
    """Drop units that are zero in every rank's gradient, though a rank may have sent them."""
    blocks = UnitShape(-(-shape.units * shape.width // BLOCK_ENTRIES), BLOCK_ENTRIES)
    sum_ = yield from served(circle, EvenPartitions(blocks, circle.size), to_blocks(mine, shape))
    return from_blocks(sum_, shape)


def agsparse(circle: Circle, shape: UnitShape, hashed: HashPartitions, mine: Coordinates) -> Summing:
    """Sum by all-gather: every rank sums all coordinates in the order of ranks."""
    message = encode(mine, shape, 0, None)
    for place in circle.others:
        circle.send(place, _FIRST, message)
    came = dict(zip(circle.others, (yield circle.awaited(_FIRST, circle.others)), strict=True))
    terms = [mine if place == circle.me else circle.read(place, came[place], shape, 0) for place in range(circle.size)]
    return summed(terms, shape)


def sparcml(circle: Circle, shape: UnitShape, hashed: HashPartitions, mine: Coordinates) -> Summing:
    """Sum by recursive doubling: in round k ranks 2^k apart exchange their sums so far.

    Ranks beyond the largest power of two hand theirs to a partner first, and get the sum from it."""
    doubling = 1 << circle.size.bit_length() - 1
    me, beyond, last = circle.me, circle.size - doubling, FIRST_STAGE + circle.size.bit_length()
    if me >= doubling:
        circle.send(me - doubling, _FIRST, encode(mine, shape, 0, None))
        (message,) = yield circle.awaited(last, [me - doubling])
        return circle.read(me - doubling, message, shape, 0)
    if me < beyond:
        (message,) = yield circle.awaited(_FIRST, [me + doubling])
        mine = summed([mine, circle.read(me + doubling, message, shape, 0)], shape)
    for k in range(doubling.bit_length() - 1):
        other = me ^ 1 << k
        circle.send(other, _SECOND + k, encode(mine, shape, 0, None))
        (message,) = yield circle.awaited(_SECOND + k, [other])
        theirs = circle.read(other, message, shape, 0)
        mine = summed([mine, theirs] if me < other else [theirs, mine], shape)
    if me < beyond:
        circle.send(me + doubling, last, encode(mine, shape, 0, None))
    return mine


def allreduce(circle: Circle, shape: UnitShape, hashed: HashPartitions, mine: Coordinates) -> Summing:
    """Sum on a ring: each range of units goes round once to be summed, and once more to be distributed. All of it
    travels."""
    split, n, me = EvenPartitions(shape, circle.size), circle.size, circle.me
    after, before = (me + 1) % n, (me - 1) % n
    ranges = [_filled(part, split, number) for number, part in enumerate(split.split(mine))]
    for turn in range(2 * (n - 1)):
        leaving, coming = (me - turn) % n, (me - turn - 1) % n
        message = encode(ranges[leaving], shape, leaving, ranges[leaving].unit, once=False)
        circle.send(after, _FIRST + turn, message)
        (taken,) = yield circle.awaited(_FIRST + turn, [before])
        came = circle.read(before, taken, shape, coming, lambda number: ranges[number].unit)
        ranges[coming] = came if turn >= n - 1 else split.sum([came, ranges[coming]], [coming, coming])
    values_NW = np.concatenate([one.values for one in ranges])
    there_K = units.nonzero_units(values_NW, shape.width)
    return Coordinates(there_K, values_NW[there_K], total(one.tally for one in ranges))


def _filled(part: Coordinates, split: EvenPartitions, number: int) -> Coordinates:
    """Return all units of a range, with zeros for missing ones."""
    begin, end = split.bounds[number], split.bounds[number + 1]
    values = np.zeros((end - begin, split.shape.width), np.float32)
    values[part.unit - np.uint32(begin)] = part.values
    return Coordinates(np.arange(begin, end, dtype=np.uint32), values, part.tally)


SUMS: Final[Mapping[Scheme, SchemeOf]] = {
    "allreduce": allreduce,
    "agsparse": agsparse,
    "sparcml": sparcml,
    "sparse-ps": sparse_ps,
    "omnireduce": omnireduce,
    "zen": zen,
}
