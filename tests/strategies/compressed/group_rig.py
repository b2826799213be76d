"""Ranks of a run in one process: the sum of one group, with messages handed over in place of sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from atoll.strategies.compressed.algorithms import compressor_of
from atoll.strategies.compressed.codes.compressors import CodePlace
from atoll.strategies.compressed.exchanges.group_sum import GroupGradient, GroupSum, RankCircle
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.staged_sums.mailbox import Awaited, Message

Change = Callable[[int, int, int, memoryview], bytes | memoryview]
"""(from, to, stage, message) to what arrives in its place."""
FIRST_ENTRY = 2**40
"""Of the group, in the model: beyond what 32 bits count."""


@dataclass
class Ran:
    """Of each rank: its sum, what it left out, the counts' sum, and the longest message it sent."""

    sums: list[torch.Tensor]
    left: list[torch.Tensor]
    counts: list[list[float]]
    longest: int


def run(
    settings: Compressed,
    values: Sequence[torch.Tensor],
    *,
    residuals: Sequence[torch.Tensor] | None = None,
    islands: Sequence[Sequence[int]] | None = None,
    divisible: bool = False,
    change: Change | None = None,
) -> Ran:
    """One sum of a group; each rank goes on as far as messages have come, until all have it. Values stay."""
    ranks, entries = range(len(values)), len(values[0])
    kept: dict[tuple[int, int, int], bytes | memoryview] = {}
    longest = 0

    def post(rank: int, to: int, stage: int, message: Message) -> None:
        nonlocal longest
        assert (rank, to, stage) not in kept, "two messages of one stage"
        longest = max(longest, len(message))
        kept[rank, to, stage] = message if change is None else change(rank, to, stage, memoryview(message))

    shape = (entries // 50, 50) if entries % 50 == 0 else (entries,)
    place = CodePlace(3, FIRST_ENTRY, (shape,), settings.density)
    left = [torch.zeros(entries) if residuals is None else residuals[rank].clone() for rank in ranks]
    groups = []
    for rank in ranks:
        value = values[rank].clone()
        mine = GroupGradient(place, value, left[rank], np.array([1.0, float(rank)], np.float32), value)
        circle = RankCircle.of(islands or [list(ranks)], rank)
        compressor = compressor_of(settings, seed=5)
        groups.append(GroupSum(circle, compressor, mine, partial(post, rank), divisible=divisible))
    for group in groups:
        group.compress()
    steps = [group.steps() for group in groups]
    waiting: dict[int, Awaited] = {rank: next(steps[rank]) for rank in ranks}
    addends = {}
    while waiting:
        ready = [rank for rank, one in waiting.items() if all((of, rank, one.stage) in kept for of in one.ranks)]
        assert ready, f"ranks {sorted(waiting)} wait for ever"
        for rank in ready:
            came = [kept.pop((of, rank, waiting[rank].stage)) for of in waiting[rank].ranks]
            try:
                waiting[rank] = steps[rank].send(list(came))
            except StopIteration as end:
                addends[rank] = end.value
                del waiting[rank]
    assert not kept, "messages that nobody waited for"
    counts = [groups[rank].add_up(addends[rank]).tolist() for rank in ranks]
    return Ran([group.mine.out_N for group in groups], left, counts, longest)
