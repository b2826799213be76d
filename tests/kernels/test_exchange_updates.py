"""Exchanging updates: every rank moves its own weights; what it is ahead of the shared parameters travels."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from exchange_job import ALL, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from update_job import UpdateJob, add, close

from atoll.errors import BadInput, DeadlineExceeded, PeerLost
from atoll.kernels.exchange_engine import GradientEngine, UpdateEngine

LAYOUTS = [[[0]], [[0], [1]], [[0, 1], [2]], [[0, 1], [2, 3]]]
SIZES = [1, 40, 1023]


@pytest.mark.parametrize("entries", [20_000, 400_000])
def test_as_many_blocks_leave_as_may(entries: int) -> None:
    """Where a threshold followed the counts of the rounds before, a fifth less left: what is sent is gone from the
    difference, and the counts swung. Of up to 4,096 blocks all are looked at for the threshold, of more a sample."""
    torch.manual_seed(1)
    engine = UpdateEngine(rank=0, islands=[[0]], values="int2", seed=1, first_round=1)
    live, scale = torch.randn(entries), torch.exp(torch.randn(entries))
    engine.add_tensor(order=0, shared_param=live.clone(), live=live)
    k_blocks, rounds, chosen = entries // 16 // 5, 30, 0
    for number in range(1, rounds + 1):
        live.add_(scale * torch.randn(entries))
        engine.sum_updates(number, 1.0, [k_blocks])
        engine.fetch([0], number, 10.0)
        chosen += engine.take_stats().chosen_blocks
    engine.close()
    assert 0.97 * rounds * k_blocks < chosen <= rounds * k_blocks


@settings(max_examples=25, deadline=None)
@given(
    islands=st.sampled_from(LAYOUTS),
    by_hand=st.booleans(),
    selection=st.sampled_from(["threshold", "topk", "random"]),
    k_blocks=st.sampled_from([1, 7, ALL]),
    live=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32),
)
def test_whatever_comes_when_each_rank_has_its_own_rounds_and_what_came(
    islands: list[list[int]], k_blocks: int, seed: int, **how: Any
) -> None:
    """1. Ranks round, messages arrive late, early and in any order, some ranks fetch and some do not.
    2. At each moment live is what it did plus what is came, and its residual is what it did less what it sent."""
    choice = random.Random(seed)
    with UpdateJob(islands, SIZES, values="float32", digest_every=3, **how) as job:
        for _ in range(40):
            rank = choice.choice(job.ranks)
            if job.wire and choice.random() < 0.6:
                job.move_one(choice.randrange(1000))
            elif choice.random() < 0.5:
                job.catch_up(rank)
            elif job.sync_round[rank] - min(job.sync_round) < 3:
                job.walk(rank, k_blocks)
            job.check(choice.choice(job.ranks))
        for rank in job.ranks:
            while job.sync_round[rank] < max(job.sync_round):
                job.walk(rank, k_blocks)
        job.drain()
        for rank in job.ranks:
            job.catch_up(rank, max(job.sync_round) - 1)
            job.check(rank)
        job.check_end()
        digests = [sorted(engine.digests()) for engine in job.engines]
        assert all(row == digests[0] for row in digests)
        assert len(digests[0]) == len(range(0, max(job.sync_round), 3)) * len(SIZES)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("islands", LAYOUTS)
def test_with_all_sent_every_rank_has_the_weighted_mean_of_all_updates(islands: list[list[int]], by_hand: bool) -> None:
    """1. Ranks train unequal shares of a batch, which change. 2. Each update counts as its round's shares say.
    Each counted 1 / ranks: with Adam a rank of 6 % moved the shared parameters as far as one of 94 %."""
    with UpdateJob(islands, SIZES, values="float32", by_hand=by_hand) as job:
        way = [torch.zeros(n, dtype=torch.float64) for n in SIZES]
        for sync_round in range(6):
            job.weigh([1.0 + (rank + sync_round // 3) % len(job.ranks) for rank in job.ranks])
            before = [[one.clone() for one in row] for row in job.did]
            for rank in job.ranks:
                job.walk(rank, ALL)
            job.drain()
            for rank in job.ranks:
                job.catch_up(rank, sync_round)
                for tensor in range(len(SIZES)):
                    way[tensor] += job.weights[rank] * (job.did[rank][tensor] - before[rank][tensor])
        for tensor, start in enumerate(job.start):
            for rank in job.ranks:
                torch.testing.assert_close(job.of[rank][tensor].live.double(), start + way[tensor], rtol=0, atol=5e-6)
                close(job.residual(rank, tensor), torch.zeros_like(start))
        job.assert_equal_shared_params()


@settings(max_examples=15, deadline=None)
@given(
    islands=st.sampled_from(LAYOUTS),
    by_hand=st.booleans(),
    values=st.sampled_from(["float32", "float16"]),
    k_blocks=st.sampled_from([1, 7, ALL]),
    seed=st.integers(0, 2**32),
)
def test_what_was_not_sent_counts_as_the_weight_of_the_round_that_sends_it(
    islands: list[list[int]], k_blocks: int, seed: int, **how: Any
) -> None:
    """1. Weights change while much is not sent yet and rounds are on their way. 2. Live weights of a rank stay what it
    did and what came. 3. At the end they are shared_param - residual / weight, of the last weight, and a rank that has
    sent nothing new since has not moved."""
    choice = random.Random(seed)
    with UpdateJob(islands, SIZES, **how) as job:
        for _ in range(8):
            job.weigh([choice.uniform(0.05, 1) for _ in job.ranks])
            for rank in job.ranks:
                job.walk(rank, k_blocks)
            while job.wire and choice.random() < 0.8:
                job.move_one(choice.randrange(1000))
            job.catch_up(choice.choice(job.ranks))
        job.drain()
        job.assert_equal_shared_params()
        for rank in job.ranks:
            job.catch_up(rank, 7)
            for tensor, mine in enumerate(job.of[rank]):
                shared_param, residual = mine.shared_param.double(), job.residual(rank, tensor)
                close(mine.live.double(), shared_param - residual / job.weights[rank])
                job.engines[rank].set_live(tensor, residual.float(), 1.0, mine.live if job.by_hand else None)
                close(job.residual(rank, tensor), residual)


@pytest.mark.parametrize(
    ("selection", "values"),
    [("threshold", "float16"), ("topk", "bfloat16"), ("random", "float16"), ("random", "bfloat16")],
)
@pytest.mark.parametrize("islands", LAYOUTS)
def test_what_16_bits_take_away_is_in_the_residual(islands: list[list[int]], selection: str, values: str) -> None:
    """In an island's sum by its leader alone."""
    with UpdateJob(islands, SIZES, values=values, selection=selection) as job:
        for sync_round in range(8):
            for rank in job.ranks:
                job.walk(rank, 9)
            if sync_round % 3 == 0:
                job.drain()
                job.catch_up(sync_round % len(job.ranks))
        job.drain()
        for rank in job.ranks:
            job.catch_up(rank, 7)
        job.check_end()


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_live_weights_of_16_bits_are_rounded_once_for_all_that_came(dtype: torch.dtype, by_hand: bool) -> None:
    with UpdateJob([[0, 1], [2]], SIZES, values="float32", live=dtype, by_hand=by_hand) as job:
        for _ in range(3):
            for rank in job.ranks:
                job.walk(rank, 9)
        job.drain()
        for rank in job.ranks:
            job.catch_up(rank, 2)
            for tensor, mine in enumerate(job.of[rank]):
                did = job.did[rank][tensor]
                came = job.came(rank, tensor, 3)
                meant = job.start[tensor] + did + came
                spacing = torch.finfo(dtype).eps * torch.maximum(meant.abs(), job.start[tensor].abs())
                assert ((mine.live.double() - meant).abs() <= 0.51 * spacing + 1e-6).all()
                close(job.residual(rank, tensor), -job.weights[rank] * did - job.sent([rank], tensor, 3))
        job.assert_equal_shared_params()


@pytest.mark.parametrize(
    ("workers", "dtype", "by_hand"),
    [(2, torch.float16, False), (2, torch.bfloat16, True), (8, torch.float16, True), (8, torch.bfloat16, False)],
)
def test_shared_params_have_every_move_of_16_bit_weights(workers: int, dtype: torch.dtype, by_hand: bool) -> None:
    """1. Each rank moves some of its weights by one step of 16 bits a round, and all of it is sent. 2. What comes of
    the others is less than a step. It was rounded away, and then sent back as this rank's own: shared parameters had 44
    % of the moves of two workers, 5 % of those of eight."""
    with UpdateJob([[rank] for rank in range(workers)], [1023], live=dtype, values="float32", by_hand=by_hand) as job:
        for _ in range(20):
            for rank in job.ranks:
                job.walk(rank, ALL, by_a_step=True)
            job.drain()
            for rank in job.ranks:
                job.catch_up(rank)
        moves = torch.stack([job.did[rank][0] for rank in job.ranks]).mean(0)
        way = job.shared_params(0)[0].double() - job.start[0]
        assert moves.abs().sum() > 0.5 * torch.finfo(dtype).eps * job.start[0].abs().sum()
        assert 0.999 < (way * moves).sum() / (moves * moves).sum() < 1.001
        torch.testing.assert_close(way, moves, rtol=0, atol=0.01 * torch.finfo(dtype).eps)
        job.assert_equal_shared_params()


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_live_weights_are_set_to_what_shared_params_and_a_residual_say(dtype: torch.dtype, by_hand: bool) -> None:
    """What 16 bits cannot hold of it is not taken for an update of this rank's."""
    with UpdateJob([[0], [1]], SIZES, live=dtype, values="float32", by_hand=by_hand) as job:
        for rank in job.ranks:
            job.walk(rank, 9)
        job.drain()
        job.catch_up(0)
        for tensor, mine in enumerate(job.of[0]):
            live, residual = mine.live if by_hand else None, 0.01 * normal(SIZES[tensor], 3, tensor)
            job.engines[0].set_live(tensor, residual, 0.25, live)
            assert torch.equal(mine.live, (mine.shared_param - 4 * residual).to(dtype))
            close(job.residual(0, tensor), residual.double())
            job.engines[0].set_live(tensor, None, 0.25, live)
            assert torch.equal(mine.live, mine.shared_param.to(dtype))
            assert not job.residual(0, tensor).any()


def test_one_rank_alone_keeps_the_very_bits_of_its_weights() -> None:
    with UpdateJob([[0]], SIZES, values="float16") as job:
        for sync_round in range(5):
            job.walk(0, 9)
            before = [mine.live.clone() for mine in job.of[0]]
            job.catch_up(0, sync_round)
            assert all(torch.equal(mine.live, old) for mine, old in zip(job.of[0], before, strict=True))


@pytest.mark.parametrize("by_hand", [False, True])
def test_updates_that_nobody_fetches_do_not_pile_up(by_hand: bool) -> None:
    """1. A layer that is never used gets 100 updates from others. 2. Then it is fetched.
    What was came was one entry more for each part and each sum; the sum of more than 64 wrote beyond an array."""
    with UpdateJob([[0], [1]], [1023], values="float32", by_hand=by_hand) as job:
        for sync_round in range(100):
            for rank in job.ranks:
                job.walk(rank, 5)
            job.drain()
            job.catch_up(1, sync_round)
        job.catch_up(0, 99)
        job.check(0)
        job.check_end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_changes_taken_between_a_copy_and_its_compression_are_not_owed(dtype: torch.dtype) -> None:
    """1. Live weights of a GPU are copied and the copy is queued. 2. Before a thread gets to it, the next forward pass
    takes changes. 3. The copy was compressed as if it had them: the others' updates were sent back to them."""
    with UpdateJob([[0], [1]], [1023], values="float32", live=dtype, by_hand=True) as job:
        for rank in job.ranks:
            job.walk(rank, ALL)
        job.drain()
        engine = job.engines[0]
        engine.quiesce(5)
        before = job.did[0][0].clone()
        job.walk(0, ALL, wait=False)
        _, [(_, index, values)] = engine.changes([0], 0, 5)
        assert len(index) == 64
        add(job.of[0][0].live, index, values)
        job.fetched[0] = [1]
        engine.resume()
        job.compute(0)
        close(job.parts[0, 1, 0], (before - job.did[0][0]) / 2)
        job.check(0)
        job.walk(0, ALL)
        job.check(0)


def test_a_rank_whose_weights_are_not_finite_harms_nobody_and_it_is_counted() -> None:
    with UpdateJob([[0], [1]], [160], values="float32") as job:
        job.of[1][0].live[17], job.of[1][0].live[150] = torch.nan, -torch.inf
        for rank in job.ranks:
            job.walk(rank, ALL)
        job.drain()
        for rank in job.ranks:
            job.catch_up(rank, 0)
        job.assert_equal_shared_params()
        assert job.shared_params(0)[0].isfinite().all()
        assert job.of[0][0].live.isfinite().all()
        assert job.engines[0].take_stats().nonfinite_blocks == 0
        assert job.engines[1].take_stats().nonfinite_blocks == 2
        out = torch.full((160,), torch.nan)
        assert job.engines[1].read_residual(0, None, out) == 2
        assert out.isfinite().all()
        assert not out[16:32].any()


def test_asking_what_is_owed_leaves_quiesced_shared_params_alone() -> None:
    """Another thread may be saving them: they were moved for a moment and then put back."""
    with UpdateJob([[0], [1]], [1_000_000], values="float32") as job:
        for _ in range(3):
            job.walk(0, ALL)  # rank 1's sums are missing: its own parts are outstanding
        job.engines[0].quiesce(5)
        shared_param, moved, done = job.shared_params(0)[0], 0, threading.Event()
        before = float(shared_param[0])
        asking = threading.Thread(target=lambda: (job.residual(0, 0), job.residual(0, 0), done.set()))
        asking.start()
        while not done.is_set():
            moved += float(shared_param[0]) != before
        asking.join(30)
        assert moved == 0


def test_the_optimizer_waits_for_parts_that_are_still_selected() -> None:
    with UpdateJob([[0], [1]], [1023]) as job:
        engine = job.engines[0]
        engine.await_compressed(0)
        engine.quiesce(5)
        job.walk(0, 9, wait=False)
        for tensors in ((), [0]):
            with pytest.raises(DeadlineExceeded, match="parts are still being selected after 0.0"):
                engine.await_compressed(0.01, tensors)
        with pytest.raises(BadInput, match="tensor = 1 is not one of"):
            engine.await_compressed(0, [1])
        engine.resume()
        engine.await_compressed(5)
        engine.fail("rank 1 is gone")
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            engine.await_compressed(5)
        engine.close()
        with pytest.raises(BadInput, match="the engine is closed"):
            engine.await_compressed(5)
        with pytest.raises(BadInput, match="the engine is closed"):
            engine.read_residual(0, None, torch.empty(1023))


def test_shared_params_are_read_as_they_are_whatever_is_compressed_beside() -> None:
    """Live weights that have others' parts already are compared with shared parameters that have not: those are moved
    for that, for a moment, which nobody may read."""
    with UpdateJob([[0], [1]], [1 << 20, 40], values="float32") as job:
        for rank in job.ranks:
            job.walk(rank, 1 << 16)
        job.drain()
        engine, shared_param = job.engines[0], job.shared_params(0)[0].clone()
        done = threading.Event()
        moved = 0

        def read() -> None:
            nonlocal moved
            out = torch.empty(1 << 20)
            while not done.is_set():
                engine.read_shared_param(0, out)
                moved += not torch.equal(out, shared_param)

        reading = threading.Thread(target=read)
        reading.start()
        for _ in range(5):
            job.walk(0, 1 << 16)
        done.set()
        reading.join(30)
        assert moved == 0
        with pytest.raises(BadInput, match="as long as shared_param"):
            engine.read_shared_param(0, torch.empty(159))


def test_a_layer_is_waited_for_alone() -> None:
    """1. Copies of two layers' weights are selected from, one by one. 2. The first layer's forward pass waits for its
    own: it waited for all, so that nothing of the selection was beside the computation."""
    with UpdateJob([[0], [1]], [1023, 40], by_hand=True) as job:
        engine = job.engines[0]
        engine.quiesce(5)
        engine.compress_live(0, 1, job.of[0][1].live.clone(), 0.5, 9)
        engine.await_compressed(0, [0])
        with pytest.raises(DeadlineExceeded, match="parts are still being selected"):
            engine.await_compressed(0.01, [0, 1])
        engine.resume()
        engine.await_compressed(5, [1])


def test_a_damaged_sum_fails_the_pipeline_and_what_was_there_stays_right() -> None:
    with UpdateJob([[0], [1]], [160], values="float32") as job:
        for rank in job.ranks:
            job.walk(rank, 3)
        assert job.engines[0].deliver(1, 1, 0, 0, 1, b"\xff" * 65) is None
        job.engines[0].idle(5)
        with pytest.raises(PeerLost, match="island 1 sent a damaged sum"):
            job.engines[0].fetch([0], 0, 5)
        job.check(0)


def test_what_makes_no_sense_is_refused() -> None:
    with UpdateJob([[0]], [160]) as job:
        engine = job.engines[0]
        with pytest.raises(BadInput, match="k_blocks has 2 entries and aggregator_blocks 2, but there are 1 tensors"):
            engine.sum_updates(0, 1.0, [1, 1])
        with pytest.raises(BadInput, match="k_blocks = 0"):
            engine.sum_updates(0, 1.0, [0])
        for weight in (0.0, -0.5, 1.1, float("nan")):
            with pytest.raises(BadInput, match=r"is not in 0\.\.1, 0 left out; pass this rank's share"):
                engine.sum_updates(0, weight, [1])
        with pytest.raises(BadInput, match="sync_round = 1 cannot be applied or accumulated after round -1"):
            engine.sum_updates(1, 1.0, [1])
        with pytest.raises(BadInput, match="was added with its live weights; pass None"):
            engine.compress_live(0, 0, torch.zeros(160), 1.0, 1)
        with pytest.raises(BadInput, match="k_blocks = 0"):
            engine.compress_live(0, 0, None, 1.0, 0)
        with pytest.raises(BadInput, match="as long as shared_param"):
            engine.read_residual(0, None, torch.empty(159))
        with pytest.raises(BadInput, match="sync_round = 1 of tensor 0 cannot be compressed"):
            engine.compress_live(1, 0, None, 1.0, 1)
        job.walk(0, 3)
        job.check(0)
    with UpdateJob([[0]], [160], by_hand=True) as job:
        with pytest.raises(BadInput, match="pass its present weights"):
            job.engines[0].compress_live(0, 0, None, 1.0, 1)
        with pytest.raises(BadInput, match="has no live buffer"):
            job.engines[0].fetch([0], -1, 0)


def test_an_engine_has_the_methods_of_its_protocol_alone() -> None:
    of_gradients = {"compress", "compress_chosen", "apply", "accumulate"}
    of_updates = {"sum_updates", "change_turns", "compress_live", "compress_chosen_live", "take_reference"}
    of_updates |= {"drift_blocks", "read_residual", "set_live"}
    assert set(dir(GradientEngine)) - set(dir(UpdateEngine)) == of_gradients
    assert set(dir(UpdateEngine)) - set(dir(GradientEngine)) == of_updates


@settings(max_examples=25, deadline=None)
@given(
    islands=st.sampled_from(LAYOUTS),
    values=st.sampled_from(["float32", "float16"]),
    selection=st.sampled_from(["threshold", "topk"]),
    k_blocks=st.sampled_from([1, 7, ALL]),
    threads=st.sampled_from([1, 2]),
    taken_early=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_snapshot_of_a_round_is_one_state_whatever_comes_later(
    islands: list[list[int]], k_blocks: int, seed: int, taken_early: bool, **how: Any
) -> None:
    """1. Each rank asks for the state of round 3 when it has chosen its part, whatever came of earlier ones by then.
    2. All go on to round 7, messages late and in any order. 3. What they got: shared parameters that are the same on
    every rank, and what each residual; together all that was done up to round 3. What 16 bits took away of sums that
    came later is counted too."""
    choice, last, ends = random.Random(seed), 3, 8
    with UpdateJob(islands, SIZES, **how) as job:
        shared_params = [[torch.zeros(n) for n in SIZES] for _ in job.ranks]
        residual = [[torch.zeros(n) for n in SIZES] for _ in job.ranks]
        did: list[list[torch.Tensor]] = [[] for _ in job.ranks]
        while job.wire or min(job.sync_round) < ends:
            rank = choice.choice(job.ranks)
            if job.wire and choice.random() < 0.6:
                job.move_one(choice.randrange(1000))
            elif job.sync_round[rank] - min(job.sync_round) < 3 and job.sync_round[rank] < ends:
                engine = job.engines[rank]
                engine.await_compressed(5)
                job.walk(rank, k_blocks, wait=False)
                engine.await_compressed(5)
                if job.sync_round[rank] == last + 1:
                    did[rank] = [one.clone() for one in job.did[rank]]
                    for tensor, mine in enumerate(job.of[rank]):
                        source, into = (
                            mine.shared_param.view(torch.uint8),
                            shared_params[rank][tensor].view(torch.uint8),
                        )
                        engine.snapshot(last, tensor, [(source[:3], into[:3]), (source[3:], into[3:])])
                        assert engine.snapshot_residual(last, tensor, None, residual[rank][tensor]) == 0
                job.compute(rank)
                job.catch_up(rank)
            if taken_early and did[rank] and min(job.engines[rank].versions()) >= last:
                for tensor in range(len(SIZES)):
                    job.engines[rank].await_snapshot([tensor], last, 5)
        for rank in job.ranks:
            for tensor in range(len(SIZES)):
                job.engines[rank].await_snapshot([tensor], last, 5)
        for tensor, start in enumerate(job.start):
            assert all(torch.equal(one[tensor], shared_params[0][tensor]) for one in shared_params)
            together = sum(weight * one[tensor] for weight, one in zip(job.weights, did, strict=True))
            left = torch.stack([one[tensor].double() for one in residual]).sum(0)
            close(start - shared_params[0][tensor].double() + left, -together)


def test_what_is_gone_cannot_be_kept_and_what_nobody_kept_not_taken() -> None:
    with UpdateJob([[0]], SIZES) as job:
        engine, (mine, *_) = job.engines[0], job.of[0]
        source, into = mine.shared_param.view(torch.uint8), torch.zeros(4 * SIZES[0], dtype=torch.uint8)
        for _ in range(2):
            job.walk(0, ALL)
        with pytest.raises(BadInput, match=r"sync_round = 0 of tensor 0 is gone: its weights are of round 1"):
            engine.snapshot(0, 0, [(source, into)])
        with pytest.raises(BadInput, match="is not the newest that was begun, which is 1"):
            engine.snapshot_residual(0, 0, None, torch.zeros(SIZES[0]))
        with pytest.raises(BadInput, match="sync_round = 1 of tensor 0 was not asked for"):
            engine.await_snapshot([0], 1, 0)
        with pytest.raises(BadInput, match="as long as its source"):
            engine.snapshot(1, 0, [(source, into[1:])])
        engine.snapshot(2, 0, [(source, into)])
        with pytest.raises(DeadlineExceeded, match="tensor 0 waits for sync round 2"):
            engine.await_snapshot([0], 2, 0.01)
