"""Exchanging updates through aggregators: who owns a tensor sums what comes for it, and sends back what the shared
parameters lack."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import block_coo
import numpy as np
import pytest
import torch
from exchange_job import ALL, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from update_job import UpdateJob, close

from atoll.errors import BadInput, DeadlineExceeded, PeerLost
from atoll.kernels.exchange_engine import ExchangeEngine, UpdateEngine

ISLANDS = [[[0], [1]], [[0], [1], [2]], [[0, 1], [2]]]
SIZES = [1, 40, 1023, 17]


class OwnedJob(UpdateJob):
    """Tensor t is island t's, modulo their number; a tensor is exchanged in every `every`-th round, from round 5 on in
    every `then`-th."""

    def __init__(
        self, islands: Sequence[Sequence[int]], sizes: Sequence[int], *, every: int = 1, then: int = 0, **how: Any
    ) -> None:
        self.every, self.then = every, then or every
        self.aggregator_sums = [torch.zeros(n) for n in sizes]
        self._leads = [k for k, island in enumerate(islands) for _ in island]
        super().__init__(islands, sizes, every=every, **how)
        for rank, (engine, mine) in enumerate(zip(self.engines, self.of, strict=True)):
            engine.remember(60)  # a message that was late may let as many rounds of a tensor through at once
            for tensor, one in enumerate(mine):
                engine.set_live(tensor, None, self.weights[rank], one.live if self.by_hand else None)

    def route(self, engine: ExchangeEngine, tensor: int) -> dict[str, Any]:
        aggregator = tensor % len(self.islands)
        rank = self.engines.index(engine)
        mine = rank == self.islands[aggregator][0]
        return {
            "turn": tensor % self.every,
            "aggregator": aggregator,
            "aggregator_sum": self.aggregator_sums[tensor] if mine else None,
        }

    def is_due(self, tensor: int, sync_round: int) -> bool:
        every = self.every if sync_round < 5 else self.then
        return sync_round % every == tensor % every

    def walk(self, rank: int, k_blocks: int, **how: Any) -> None:
        if self.sync_round[rank] == 5:
            self.engines[rank].change_turns(5, self.then, [tensor % self.then for tensor in range(len(self.sizes))])
        super().walk(rank, k_blocks, **how)

    def came(self, rank: int, tensor: int, rounds: int) -> torch.Tensor:
        totals = [total for (at, of), total in self.totals.items() if of == tensor and at < rounds]
        came = torch.stack(totals).sum(0) if totals else torch.zeros(self.sizes[tensor], dtype=torch.float64)
        return self.sent([rank], tensor, rounds) / self.weights[rank] - came

    def sent(self, ranks: Sequence[int], tensor: int, rounds: int) -> torch.Tensor:
        due = [one for one in range(rounds) if self.is_due(tensor, one)]
        parts = [self.parts[rank, sync_round, tensor] for rank in ranks for sync_round in due]
        return torch.stack(parts).sum(0) if parts else torch.zeros(self.sizes[tensor], dtype=torch.float64)

    def check_end(self) -> None:
        self.assert_equal_shared_params()
        for tensor, start in enumerate(self.start):
            residuals = [self.residual(rank, tensor) for rank in self.ranks]
            did = sum(self.weights[rank] * self.did[rank][tensor] for rank in self.ranks)
            left = torch.stack(residuals).sum(0) + self.aggregator_sums[tensor].double()
            close(start - self.shared_params(0)[tensor].double() + left, -did)
            for rank in self.ranks:
                shared_param = self.shared_params(rank)[tensor].double()
                close(self.of[rank][tensor].live.double(), shared_param - residuals[rank] / self.weights[rank])


@settings(max_examples=25, deadline=None)
@given(
    islands=st.sampled_from(ISLANDS),
    values=st.sampled_from(["float32", "float16", "int8", "int4", "int2"]),
    by_hand=st.booleans(),
    every=st.sampled_from([1, 3]),
    then=st.sampled_from([1, 2, 3]),
    selection=st.sampled_from(["threshold", "topk", "random"]),
    k_blocks=st.sampled_from([1, 7, ALL]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32),
)
def test_whatever_comes_when_shared_params_are_equal_and_nothing_is_lost(
    islands: list[list[int]], k_blocks: int, seed: int, **how: Any
) -> None:
    """1. Ranks round, messages arrive late, early and in any order, also of rounds after a change of turns that the
    receiver does not know yet. 2. At each moment live is what it did plus what
    came from aggregators less what it sent. 3. In the end all shared parameters have the same bits, and shared
    parameters, residuals and aggregators' sums together have all that was done."""
    choice = random.Random(seed)
    alone = all(len(island) == 1 for island in islands)  # in an island a leader takes back what rounding its sum loses
    with OwnedJob(islands, SIZES, digest_every=3, **how) as job:
        for _ in range(60):
            rank = choice.choice(job.ranks)
            if job.wire and choice.random() < 0.6:
                job.move_one(choice.randrange(1000))
            elif choice.random() < 0.5:
                job.catch_up(rank)
            elif job.sync_round[rank] - min(job.sync_round) < 3:
                job.walk(rank, k_blocks)
            if alone:
                job.check(choice.choice(job.ranks))
        for rank in job.ranks:
            while job.sync_round[rank] < max(job.sync_round):
                job.walk(rank, k_blocks)
        job.drain()
        for rank in job.ranks:
            job.catch_up(rank, max(job.sync_round) - 1)
        job.check_end()
        digests = [sorted(engine.digests()) for engine in job.engines]
        assert all(row == digests[0] for row in digests)


def test_what_an_aggregator_does_not_send_back_waits_in_its_sum() -> None:
    """1. Two ranks send all of a tensor, and its aggregator one block back in each round. 2. Shared parameters move by
    that block; the rest comes in later rounds, though nothing new is sent."""
    with OwnedJob([[0], [1]], [160], values="float32", selection="topk") as job:
        for rank in job.ranks:
            job.walk(rank, ALL)
        job.drain()
        job.engines[0].idle(5)
        moved = job.shared_params(0)[0] != job.start[0].float()
        assert moved.view(-1, 16).any(1).sum() == 10  # all blocks: aggregator_blocks is k_blocks
        for engine in job.engines:
            engine.fetch([0], 0, 5)
        before = job.aggregator_sums[0].clone()
        assert not before.any()
        for rank, engine in enumerate(job.engines):
            job.of[rank][0].live += 1.0
            engine.sum_updates(1, job.weights[rank], [ALL], [3])
        for sync_round in range(2, 5):
            job.exchange()
            assert int((job.aggregator_sums[0] != 0).view(-1, 16).any(1).sum()) == 10 - 3 * (sync_round - 1)
            for rank, engine in enumerate(job.engines):
                engine.fetch([0], sync_round - 1, 5)
                engine.sum_updates(sync_round, job.weights[rank], [1], [3])
        job.exchange()
        assert not job.aggregator_sums[0].any()
        assert same_bits(job.shared_params(0)[0], job.shared_params(1)[0])


def test_two_ranks_send_each_other_what_is_theirs_alone() -> None:
    """1. Of two tensors each rank owns one. 2. It sends one part, of the other's, and one total, of its own: what comes
    to a rank does not grow with their number."""
    with OwnedJob([[0], [1], [2]], [64, 64, 64], values="int2") as job:
        for rank in job.ranks:
            job.walk(rank, ALL)
        sent = job.wire.copy()
        job.drain()
        assert sorted((sender, message.tensor, receiver) for sender, message, receiver in sent) == sorted(
            (sender, tensor, tensor) for sender in job.ranks for tensor in job.ranks if sender != tensor
        )
        assert all(message.kind == 7 for _, message, _ in sent)
        assert sorted(job.totals) == [(0, 0), (0, 1), (0, 2)]


def test_what_is_not_due_is_counted_and_waits_for_nobody() -> None:
    """1. Of three tensors one is exchanged in a round. 2. The others' versions go on without any message, though the
    other rank has done nothing."""
    with OwnedJob([[0], [1]], [64, 64, 64], every=3) as job:
        job.walk(0, ALL)
        assert {message.tensor for _, message, _ in job.wire} <= {0}
        assert job.engines[0].versions() == [-1, 0, 0]
        with pytest.raises(DeadlineExceeded, match="tensor 0 waits for sync round 0: sum of island 1 is missing"):
            job.engines[0].fetch([0, 1, 2], 0, 0.05)
        job.walk(1, ALL)
        with pytest.raises(DeadlineExceeded, match="total of island 0, its aggregator, is missing"):
            job.engines[1].fetch([0], 0, 0.05)
        job.drain()
        assert [engine.versions() for engine in job.engines] == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("kind", "origin", "tensor", "sync_round", "why"),
    [
        (7, 1, 1, 1, "not for this rank"),  # rank 0 does not own tensor 1
        (1, 1, 0, 0, "not for this rank"),  # sums of owned tensors go to aggregators
        (8, 1, 0, 0, "not from its aggregator"),
        (8, 0, 0, 0, "not from its aggregator"),  # rank 0 itself
        (8, 2, 1, 1, "not from its aggregator"),
        (7, 1, 0, 1, "not its turn"),
        (7, 9, 0, 0, "from nobody"),
        (7, 0, 0, 0, "from nobody"),
    ],
)
def test_frames_of_liars_are_refused(kind: int, origin: int, tensor: int, sync_round: int, why: str) -> None:
    with OwnedJob([[0], [1], [2]], [64, 64], every=2) as job:
        for _ in range(2):
            job.walk(0, ALL)
        assert job.engines[0].deliver(kind, origin, sync_round, tensor, 1, b"x" * 10) == why


def test_a_damaged_total_fails_the_engine_by_name() -> None:
    with OwnedJob([[0], [1]], [64, 64]) as job:
        job.walk(0, ALL)
        assert job.engines[0].deliver(8, 1, 0, 1, 1, b"x") is None
        with pytest.raises(PeerLost, match="island 1 sent a damaged total of tensor 1"):
            job.engines[0].fetch([1], 0, 5)
        assert job.engines[0].deliver(8, 1, 0, 1, 1, b"x") == "twice"


def test_an_aggregator_that_does_not_fit_is_refused() -> None:
    engine = UpdateEngine(rank=0, islands=[[0], [1]])
    tensor = {"order": 0, "shared_param": torch.zeros(16), "live": torch.zeros(16)}
    with pytest.raises(BadInput, match="aggregator = 2 is none of the 2 islands"):
        engine.add_tensor(**tensor, aggregator=2)
    with pytest.raises(BadInput, match="this rank aggregates the tensor, but aggregator_sum is None"):
        engine.add_tensor(**tensor, aggregator=0)
    with pytest.raises(BadInput, match="aggregator_sum is given, but the tensor is another's"):
        engine.add_tensor(**tensor, aggregator=1, aggregator_sum=torch.zeros(16))
    with pytest.raises(BadInput, match="turn = 1 is not in"):
        engine.add_tensor(**tensor, turn=1)
    engine.close()
    with pytest.raises(BadInput, match="every = 0 exchanges nothing"):
        UpdateEngine(rank=0, islands=[[0], [1]], every=0)


def test_shared_params_of_a_replicas_second_rank_follow_what_its_leader_is_told() -> None:
    """1. Ranks 0 and 1 are one island: the second sends nothing, and no part is for it. 2. Its shared parameters take
    the total of the other island, which its leader passes on, and wait for it by name."""
    engine = UpdateEngine(rank=1, islands=[[0, 1], [2]], replicas=True, first_round=1)
    shared_param = torch.zeros(16)
    engine.add_tensor(order=0, shared_param=shared_param, aggregator=1)
    engine.sum_updates(1, 0.5, [1], [1])
    assert engine.take_outgoing(1000) == []
    with pytest.raises(BadInput, match="this rank follows its island's leader"):
        engine.compress_live(2, 0, torch.ones(16), 0.5, 1)
    assert engine.deliver(0, 0, 1, 0, 1, b"x" * 10) == "not for this rank"
    with pytest.raises(DeadlineExceeded, match="total of island 1, its aggregator, is missing"):
        engine.changes([0], 1, 0.05)
    payload = torch.zeros(100, dtype=torch.uint8)
    index, values = np.array([0], np.uint32), np.full((1, 16), -2.0, np.float32)
    written = block_coo.encode(index, values, 16, payload.numpy(), value_format="float16")
    assert engine.deliver(8, 1, 1, 0, 1, payload[:written].numpy().tobytes()) is None
    assert [change.version for change in engine.changes([0], 1, 5)[1]] == [1]
    assert torch.equal(shared_param, torch.full((16,), 2.0))
    engine.close()
