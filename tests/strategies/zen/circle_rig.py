"""Ranks of a circle in one process: their schemes, with messages handed over in place of sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from atoll.planning.sparse_scheme import Scheme
from atoll.strategies.zen.coordinates import Coordinates, UnitShape
from atoll.strategies.zen.partitions import HashPartitions, hash_seeds
from atoll.strategies.zen.schemes import SUMS, Circle

Change = Callable[[int, int, int, memoryview], bytes | memoryview]
"""(from, to, stage, message) to what arrives in its place."""


class Ran:
    """What each rank got, and the bytes that it sent and received."""

    def __init__(self, size: int) -> None:
        self.sums: list[Coordinates] = []
        self.sent, self.received = [0] * size, [0] * size


def run(scheme: Scheme, shape: UnitShape, terms: Sequence[Coordinates], change: Change | None = None) -> Ran:
    """One sum; each rank goes on as far as messages have come, until all have it."""
    size, ran, kept = len(terms), Ran(len(terms)), {}

    def post(rank: int, to: int, stage: int, message: memoryview) -> None:
        assert (stage, rank, to) not in kept, "two messages of one stage"
        ran.sent[rank] += len(message)
        ran.received[to] += len(message)
        kept[stage, rank, to] = message if change is None else change(rank, to, stage, message)

    circles = [Circle(tuple(range(size)), rank, partial(post, rank)) for rank in range(size)]
    steps = [
        SUMS[scheme](circles[rank], shape, HashPartitions(shape, hash_seeds(5), size), terms[rank])
        for rank in range(size)
    ]
    done: dict[int, Coordinates] = {}
    waiting = {}
    for rank in range(size):
        try:
            waiting[rank] = next(steps[rank])
        except StopIteration as end:
            done[rank] = end.value
    while waiting:
        ready = [rank for rank, one in waiting.items() if all((one.stage, of, rank) in kept for of in one.ranks)]
        assert ready, f"ranks {sorted(waiting)} wait for ever"
        for rank in ready:
            came = [kept.pop((waiting[rank].stage, of, rank)) for of in waiting[rank].ranks]
            try:
                waiting[rank] = steps[rank].send(came)
            except StopIteration as end:
                done[rank] = end.value
                del waiting[rank]
    assert not kept, "messages that nobody waited for"
    ran.sums = [done[rank] for rank in range(size)]
    return ran
