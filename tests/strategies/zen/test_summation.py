"""Sums within islands, then between them, then back: messages handed over in place of sockets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atoll.agent.runtime.transport.frames import Kind
from atoll.strategies.staged_sums.exchange import StagedExchange
from atoll.strategies.zen.coordinates import Coordinates, GradientLayout, SumTally
from atoll.strategies.zen.messages import HEADER_BYTES, largest
from atoll.strategies.zen.partitions import hash_seeds
from atoll.strategies.zen.schemes import stages_among
from atoll.strategies.zen.summation import Summation
from atoll.strategies.zen.tensor import SeparateTensor

ISLANDS = [[0, 1], [2]]
UNITS = 4_096


class Post:
    """A Sender: what a rank sends is in the other's mailbox at once. lengths: by (from, to)."""

    def __init__(self, rank: int, exchanges: list[StagedExchange], lengths: dict[tuple[int, int], int]) -> None:
        self._rank, self._exchanges, self._lengths = rank, exchanges, lengths

    def send(self, to: int, number: int, tensor: int, count: int, payload: memoryview, /) -> None:
        self._lengths[self._rank, to] = len(payload)
        flaw = self._exchanges[to].mailbox.deliver(Kind.DIRECT, self._rank, number, tensor, count, payload)
        assert flaw is None, flaw


@pytest.mark.parametrize(
    ("density", "index_bytes"), [(0.01, 4 * 41), (0.5, UNITS // 8), (1.0, 0)], ids=["indices", "bitmap", "nothing"]
)
def test_within_an_island_messages_have_the_shortest_form_too(density: float, index_bytes: int) -> None:
    """A mate's gradient to its leader, and the sum of all back: with indices, a bitmap of all units, or neither."""
    count = round(density * UNITS)
    rng = np.random.default_rng(3)
    terms = []
    for _ in range(3):
        unit = np.sort(rng.choice(UNITS, count, replace=False)).astype(np.uint32)
        values = rng.standard_normal((count, 1)).astype(np.float32)
        terms.append(Coordinates(unit, values, SumTally(GradientLayout.SPARSE, count)))
    tensors = [SeparateTensor(0, "table", nn.Parameter(torch.empty(UNITS, 1, device="meta")), True, "zen")] * 3
    lengths: dict[tuple[int, int], int] = {}
    exchanges: list[StagedExchange] = []
    for rank in range(3):
        post = Post(rank, exchanges, lengths)
        exchanges.append(StagedExchange(post, ["table"], [largest(tensors[0].shape)], stages_among(3)))
    for one in exchanges:
        one.begin(1)
        one.start()
    sums = [Summation(exchanges[rank], ISLANDS, rank, hash_seeds(1)) for rank in range(3)]
    started = [sums[rank].start(tensors[rank], terms[rank], lambda _: None) for rank in range(3)]
    results = [exchanges[rank].finish(started[rank], 30.0) for rank in range(3)]
    for one in exchanges:
        one.close()
    expected = np.zeros(UNITS, np.float32)
    for term in terms:
        expected[term.unit] += term.values[:, 0]
    for result in results:
        summed = np.zeros(UNITS, np.float32)
        summed[result.unit] = result.values[:, 0]
        np.testing.assert_allclose(summed, expected, rtol=1e-5, atol=1e-6)
    assert lengths[1, 0] == HEADER_BYTES + index_bytes + 4 * count
    there = len(np.unique(np.concatenate([term.unit for term in terms])))
    assert lengths[0, 1] <= HEADER_BYTES + UNITS // 8 + 4 * there
