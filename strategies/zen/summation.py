"""Sum tensors within islands, then between them by their schemes, then back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.strategies.staged_sums.exchange import Post, StagedExchange, StagedSum, Steps
from atoll.strategies.staged_sums.mailbox import Awaited
from atoll.strategies.zen.coordinates import Coordinates, summed
from atoll.strategies.zen.messages import encode
from atoll.strategies.zen.partitions import HashPartitions
from atoll.strategies.zen.schemes import SUMS, Circle
from atoll.strategies.zen.tensor import SeparateTensor

_INSIDE, _RESULT = 0, 1  # stages before those of a scheme


class Summation:
    """Sums of a run's tensors. The exchange's thread carries out their steps."""

    def __init__(
        self, exchange: StagedExchange, islands: Sequence[Sequence[int]], rank: int, seeds: Sequence[int]
    ) -> None:
        self._exchange, self._rank, self._seeds = exchange, rank, seeds
        own = next(tuple(ranks) for ranks in islands if rank in ranks)
        several = len(islands) > 1
        # Between islands the first rank of each takes part, for all of its island.
        self.circle = tuple(sorted(min(ranks) for ranks in islands)) if several else own
        self._leader, self._mates = (own[0], own[1:]) if several else (rank, ())
        self._hashed: dict[tuple[int, int], HashPartitions] = {}  # by the tensor's number, and how many there are

    def start(
        self, tensor: SeparateTensor, mine: Coordinates, ended: Callable[[object], None]
    ) -> StagedSum[Coordinates]:
        return self._exchange.submit(
            tensor.number, self._steps(tensor, mine, self._exchange.poster(tensor.number)), ended
        )

    def _steps(self, tensor: SeparateTensor, mine: Coordinates, post: Post) -> Steps[Coordinates]:
        """Sum inside the island first, then between islands, then distribute inside."""
        shape, whole = tensor.shape, self._hashed_of(tensor, 1)
        if self._rank != self._leader:
            post(self._leader, _INSIDE, _shortest(mine, whole))
            (message,) = yield Awaited(_RESULT, (self._leader,))
            return self._island(post).read(0, message, shape, 0, whole.members)
        if self._mates:
            came = yield Awaited(_INSIDE, self._mates)
            island = self._island(post)
            terms = [
                island.read(place, message, shape, 0, whole.members) for place, message in enumerate(came, start=1)
            ]
            mine = summed([mine, *terms], shape)
        circle = Circle(self.circle, self.circle.index(self._rank), post)
        sum_ = yield from SUMS[tensor.scheme](circle, shape, self._hashed_of(tensor, len(self.circle)), mine)
        if self._mates:
            message = _shortest(sum_, whole)
            for mate in self._mates:
                post(mate, _RESULT, message)
        return sum_

    def _hashed_of(self, tensor: SeparateTensor, count: int) -> HashPartitions:
        key = tensor.number, count
        if key not in self._hashed:
            self._hashed[key] = HashPartitions(tensor.shape, self._seeds, count)
        return self._hashed[key]

    def _island(self, post: Post) -> Circle:
        ranks = (self._leader, *self._mates)
        return Circle(ranks, ranks.index(self._rank) if self._rank in ranks else 0, post)


def _shortest(mine: Coordinates, whole: HashPartitions) -> memoryview:
    """Return the coordinates of a tensor in one part."""
    return encode(mine, whole.shape, 0, whole.listed(0, len(mine.unit)))
