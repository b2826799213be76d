"""Sum one group over all ranks, continued as messages arrive.

First within the island, whole; then between the first ranks of islands, compressed; then back, as received. With one
rank an island, or one island, its ranks exchange with each other. All ranks decode the same messages in the same order:
the sum has the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import BadInput
from atoll.kernels.signs import SIGN_BLOCK
from atoll.strategies.compressed.codes.compressors import CodePlace, Compressor, as_payload
from atoll.strategies.compressed.codes.sparse_codes import compress_with_momentum
from atoll.strategies.compressed.exchanges.messages import EntryForm, bundled, decode, encode, unbundled
from atoll.strategies.compressed.groups.options import Way
from atoll.strategies.staged_sums.exchange import Post, StagedExchange, Steps
from atoll.strategies.staged_sums.mailbox import Awaited, Message

STAGES: Final = 4
INSIDE, FIRST, SECOND, RESULT = range(STAGES)
"""Number of stages: to the island's first rank, between those twice, back."""
Counts: TypeAlias = NDArray[np.float32]
Summing: TypeAlias = Steps[list["Addend"]]
ALIGNED: Final = SIGN_BLOCK
"""Entries to whose multiples the ranges of a divided group are aligned."""
COMPRESSED_MOST: Final = 2.0**40
"""Largest magnitude of an entry that is compressed: sums of squares of such entries stay far below the limit of
float32."""


@dataclass(frozen=True, slots=True)
class Addend:
    """Message with a part of the sum: entries [begin, end) of the group, from `rank`."""

    rank: int
    begin: int
    end: int
    counts: int
    message: Message


@dataclass(frozen=True, slots=True)
class RankCircle:
    """Ranks that exchange compressed gradients, ascending. leader, mates: of this rank's island, if islands have
    several ranks."""

    ranks: tuple[int, ...]
    rank: int
    leader: int
    mates: tuple[int, ...]

    @classmethod
    def of(cls, islands: Sequence[Sequence[int]], rank: int) -> RankCircle:
        own = next(tuple(sorted(ranks)) for ranks in islands if rank in ranks)
        if len(islands) == 1:
            return cls(own, rank, rank, ())
        return cls(tuple(sorted(min(ranks) for ranks in islands)), rank, own[0], own[1:])

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(one for one in self.ranks if one != self.rank)


def at_once() -> None: ...


@dataclass(slots=True)
class GroupGradient:
    """This rank's part of one group, in one pass.

    value_N: float32. residual_N: in place, the part that is left out. Both are in the memory of the compressing device.
    counts: exact. out_N: float32, receives the sum; may be value_N itself. velocity_N, momentum: as of
    compress_with_momentum, if momentum is not 0."""

    place: CodePlace
    value_N: torch.Tensor
    residual_N: torch.Tensor
    counts: Counts
    out_N: torch.Tensor
    velocity_N: torch.Tensor | None = None
    momentum: float = 0.0
    ready: Callable[[], object] = at_once
    """Function that waits until value_N is complete."""


class GroupSum:
    """Sum of one group. `steps` posts and waits; `add_up` decodes the received messages."""

    def __init__(
        self, circle: RankCircle, compressor: Compressor, mine: GroupGradient, post: Post, *, divisible: bool
    ) -> None:
        self.mine, self._circle, self._compressor, self._post = mine, circle, compressor, post
        self._divisible = divisible and compressor.divisible
        self._own: dict[int, Message] = {}  # of the first stage, by the place of the range
        self._compressed = False

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of this rank's own part."""
        return sum(len(message) for message in self._own.values())

    def compress(self) -> None:
        """Compress this rank's own part. An island's mates compress nothing: what they left out before is sent
        along."""
        self._compressed = True
        mine = self.mine
        mine.ready()
        if self._circle.rank != self._circle.leader:
            self._own = {0: self._whole(mine)}
        elif not self._circle.mates:
            self._compress_ranges()

    def steps(self) -> Summing:
        """Compress if `compress` was not called, and exchange. Raises BadInput naming the rank of an impossible
        message."""
        if not self._compressed:
            self.compress()
        circle = self._circle
        if circle.rank != circle.leader:
            self._post(circle.leader, INSIDE, self._own[0])
            (message,) = yield Awaited(RESULT, (circle.leader,))
            return self._from_leader(message)
        if circle.mates:
            came = yield Awaited(INSIDE, circle.mates)
            for mate, message in zip(circle.mates, came, strict=True):
                self._add_mate(mate, message)
            self._compress_ranges()
        addends = yield from (self._divided() if self._divisible else self._everybody_all())
        if circle.mates:
            result = bundled([addend.message for addend in addends])
            for mate in circle.mates:
                self._post(mate, RESULT, result)
        return addends

    def decoded_steps(self) -> Steps[Counts]:
        """Exchange as `steps`, and decode the received messages. Return the sum of the counts."""
        return self.add_up((yield from self.steps()))

    def add_up(self, addends: Sequence[Addend]) -> Counts:
        """Write the sum to out_N. Return the sum of the counts. Raises BadInput naming the rank."""
        out_N = self.mine.out_N
        out_N.zero_()
        counts = np.zeros_like(self.mine.counts)
        for addend in addends:
            counts[: addend.counts] += self._add(addend, out_N[addend.begin : addend.end])
        return counts

    # --- the exchange between islands

    def _everybody_all(self) -> Summing:
        """Exchange indivisibly: every rank sends its whole part to every other."""
        circle = self._circle
        for other in circle.others:
            self._post(other, FIRST, self._own[0])
        came = dict(zip(circle.others, (yield Awaited(FIRST, circle.others)), strict=True))
        came[circle.rank] = self._own[0]
        entries, counts = len(self.mine.value_N), len(self.mine.counts)
        return [Addend(rank, 0, entries, counts, came[rank]) for rank in circle.ranks]

    def _divided(self) -> Summing:
        """Exchange divisibly: each rank serves a range. What compressing its sum again leaves out counts in this rank's
        residual, as its own."""
        circle, me, ranges = self._circle, self._circle.ranks.index(self._circle.rank), self._ranges()
        for place, other in enumerate(circle.ranks):
            if other != circle.rank:
                self._post(other, FIRST, self._own[place])
        came = dict(zip(circle.others, (yield Awaited(FIRST, circle.others)), strict=True))
        came[circle.rank] = self._own[me]
        begin, end, counted = ranges[me]
        sum_M = torch.zeros_like(self.mine.value_N[begin:end])
        counts = np.zeros(counted, np.float32)
        for rank in circle.ranks:
            counts += self._add(Addend(rank, begin, end, counted, came[rank]), sum_M)
        message = self._encoded(sum_M, self.mine.residual_N[begin:end], None, self._place(begin, end), counts)
        for other in circle.others:
            self._post(other, SECOND, message)
        told = dict(zip(circle.others, (yield Awaited(SECOND, circle.others)), strict=True))
        told[circle.rank] = message
        return [Addend(rank, *ranges[place], told[rank]) for place, rank in enumerate(circle.ranks)]

    def _from_leader(self, message: Message) -> list[Addend]:
        """Return the messages that the leader received, unchanged."""
        circle, entries, counts = self._circle, len(self.mine.value_N), len(self.mine.counts)
        try:
            messages = unbundled(message, len(circle.ranks))
        except BadInput as error:
            raise BadInput(f"rank {circle.leader} sent a message that cannot be: {error}") from error
        ranges = self._ranges() if self._divisible else [(0, entries, counts)] * len(circle.ranks)
        return [Addend(rank, *ranges[place], messages[place]) for place, rank in enumerate(circle.ranks)]

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return first entry, end and counts of the range that each rank of the circle serves; the first has all
        counts."""
        entries, ranks = len(self.mine.value_N), len(self._circle.ranks)
        blocks = -(-entries // ALIGNED)
        bounds = [min(blocks * place // ranks * ALIGNED, entries) for place in range(ranks + 1)]
        return [
            (bounds[place], bounds[place + 1], len(self.mine.counts) if place == 0 else 0) for place in range(ranks)
        ]

    # --- messages

    def _compress_ranges(self) -> None:
        mine = self.mine
        ranges = self._ranges() if self._divisible else [(0, len(mine.value_N), len(mine.counts))]
        self._own = {
            place: self._encoded(
                mine.value_N[begin:end],
                mine.residual_N[begin:end],
                None if mine.velocity_N is None else mine.velocity_N[begin:end],
                self._place(begin, end),
                mine.counts[:counts],
            )
            for place, (begin, end, counts) in enumerate(ranges)
        }

    def _encoded(
        self,
        value_M: torch.Tensor,
        residual_M: torch.Tensor,
        velocity_M: torch.Tensor | None,
        place: CodePlace,
        counts: Counts,
    ) -> Message:
        """Send a part whole, as strategy `dense` does, if an entry is not finite or nearly so; residual and velocity
        stay."""
        if not compressible(value_M):
            return encode(EntryForm.WHOLE, place, len(value_M), counts, as_payload(value_M))
        if velocity_M is None:
            payload = self._compressor.compress(value_M, residual_M, place)
        else:
            payload = compress_with_momentum(
                self._compressor, value_M, velocity_M, residual_M, place, momentum=self.mine.momentum
            )
        return encode(EntryForm.CODE, place, len(value_M), counts, payload)

    @staticmethod
    def _whole(mine: GroupGradient) -> Message:
        if compressible(mine.value_N):
            mine.value_N.add_(mine.residual_N)
            mine.residual_N.zero_()
        return encode(EntryForm.WHOLE, mine.place, len(mine.value_N), mine.counts, as_payload(mine.value_N))

    def _add_mate(self, mate: int, message: Message) -> None:
        mine = self.mine
        entries = len(mine.value_N)
        mine.counts = mine.counts + self._add(Addend(mate, 0, entries, len(mine.counts), message), mine.value_N)

    def _add(self, addend: Addend, out_M: torch.Tensor) -> Counts:
        place = self._place(addend.begin, addend.end)
        try:
            said = decode(addend.message, place, addend.end - addend.begin, addend.counts)
            said.add_to(out_M, self._compressor, place)
        except BadInput as error:
            raise BadInput(f"rank {addend.rank} sent a message that cannot be: {error}") from error
        return said.counts

    def _place(self, begin: int, end: int) -> CodePlace:
        mine = self.mine.place
        if (begin, end) == (0, len(self.mine.value_N)):
            return mine
        return CodePlace(mine.round, mine.first + begin, (), mine.density)


def compressible(value_N: torch.Tensor) -> bool:
    """Return whether all entries are finite, and far from the limit of float32."""
    if not value_N.numel():
        return True
    least, most = torch.aminmax(value_N)  # NaN where any entry is
    return bool(torch.maximum(most, -least) <= COMPRESSED_MOST)


class ExchangedGroup:
    """Sum of a group that an exchange carries out. The thread of the exchange does what its way puts on the CPU."""

    def __init__(
        self,
        exchange: StagedExchange,
        tensor: int,
        circle: RankCircle,
        compressor: Compressor,
        mine: GroupGradient,
        *,
        way: Way,
        ended: Callable[[object], None],
    ) -> None:
        """Begin to sum a group, named by its first tensor. Its memory is the exchange's until `finish`."""
        self.sum = GroupSum(circle, compressor, mine, exchange.poster(tensor), divisible=way.divisible)
        if way.compress == "device":
            self.sum.compress()
        steps: Steps[Counts | list[Addend]] = self.sum.decoded_steps() if way.decompress == "cpu" else self.sum.steps()
        self._exchange, self._staged = exchange, exchange.submit(tensor, steps, ended)

    def finish(self, deadline_s: float) -> Counts:
        """Wait until the sum is in the group's memory. Returns the counts. Raises PeerLost, BadInput."""
        found = self._exchange.finish(self._staged, deadline_s)
        return self.sum.add_up(found) if isinstance(found, list) else found
