"""Engines of all ranks against plain torch: what is selected, summed and applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exchange_job import ALL, LAYOUTS, RATES, Job, normal, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import DeadlineExceeded
from atoll.kernels.compress import block_count
from atoll.kernels.exchange_engine import Rule, Selection

SIZES = [1, 40, 1023]


def torch_optimizer(rule: Rule, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    lr, decay, first, beta2, epsilon = RATES[rule]
    if rule in ("sgd", "nesterov"):
        return torch.optim.SGD(parameters, lr, momentum=first, weight_decay=decay, nesterov=rule == "nesterov")
    make = torch.optim.Adam if rule == "adam" else torch.optim.AdamW
    return make(parameters, lr, betas=(first, beta2), eps=epsilon, weight_decay=decay)


@pytest.mark.parametrize("rule", RATES)
@pytest.mark.parametrize("islands", LAYOUTS)
def test_with_all_blocks_sent_it_is_torch_on_the_summed_gradient(islands: list[list[int]], rule: Rule) -> None:
    with Job(islands, SIZES, rule=rule, values="float32") as job:
        expected = [shared_param.double().requires_grad_() for shared_param in job.shared_params(0)]
        optimizer = torch_optimizer(rule, expected)
        for sync_round in range(5):
            gradients = job.compress(sync_round, ALL)
            job.apply(sync_round)
            job.exchange()
            for tensor, parameter in enumerate(expected):
                parameter.grad = torch.stack([g[tensor].double() for g in gradients]).mean(0)
            optimizer.step()
        job.fetch(4)
        job.assert_equal_shared_params()
        for mine, plain, tensors in zip(job.shared_params(0), expected, job.of[0], strict=True):
            torch.testing.assert_close(mine.double(), plain.detach(), rtol=1e-4, atol=1e-4)
            assert same_bits(mine, tensors.live)


class PlainSgd:
    """Top-k blocks with error feedback, summed and applied by momentum SGD on touched blocks, in float64."""

    def __init__(self, shared_param: torch.Tensor, ranks: int, k_blocks: int) -> None:
        self.shared_param, self.momentum = padded(shared_param), padded(torch.zeros_like(shared_param))
        self.residual = [torch.zeros_like(self.shared_param) for _ in range(ranks)]
        self.k_blocks = k_blocks

    def sync_round(self, gradients: Sequence[torch.Tensor]) -> None:
        lr, decay, momentum, _, _ = RATES["sgd"]
        total, touched = torch.zeros_like(self.shared_param), torch.zeros(len(self.shared_param), dtype=torch.bool)
        for rank, gradient in enumerate(gradients):
            residual = self.residual[rank] + padded(gradient) / len(gradients)
            self.residual[rank] = residual
            chosen = residual.abs().sum(1).topk(min(self.k_blocks, len(residual))).indices
            total[chosen] += residual[chosen]
            residual[chosen] = 0
            touched[chosen] = True
        g = total[touched] + decay * self.shared_param[touched]
        self.momentum[touched] = momentum * self.momentum[touched] + g
        self.shared_param[touched] -= lr * self.momentum[touched]


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.double(), (0, -len(x) % 16)).reshape(-1, 16)


@pytest.mark.parametrize("islands", LAYOUTS)
def test_with_few_blocks_sent_it_is_the_plain_method(islands: list[list[int]]) -> None:
    with Job(islands, [40, 1023, 3000], values="float32", selection="topk") as job:
        ranks = len(job.engines)
        plain = [PlainSgd(shared_param, ranks, 7) for shared_param in job.shared_params(0)]
        for sync_round in range(12):
            gradients = job.compress(sync_round, 7)
            job.apply(sync_round)
            job.exchange()
            for tensor, one in enumerate(plain):
                one.sync_round([mine[tensor] for mine in gradients])
        job.assert_equal_shared_params()
        for tensor, one in enumerate(plain):
            torch.testing.assert_close(padded(job.shared_params(0)[tensor]), one.shared_param, rtol=1e-4, atol=1e-4)
            for rank in range(ranks):
                residual = padded(job.of[rank][tensor].residual)
                torch.testing.assert_close(residual, one.residual[rank], rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    islands=st.sampled_from(LAYOUTS),
    rule=st.sampled_from(sorted(RATES)),
    values=st.sampled_from(["float32", "float16", "bfloat16"]),
    selection=st.sampled_from(["threshold", "topk", "random"]),
    k_blocks=st.sampled_from([1, 5, ALL]),
    scale=st.sampled_from([1e-6, 1.0, 1e7]),
    threads=st.sampled_from([1, 3]),
    lazy=st.booleans(),
    error_feedback=st.booleans(),
)
def test_shared_params_are_equal_on_all_ranks_whatever_the_settings(
    islands: list[list[int]], k_blocks: int, scale: float, **how: Any
) -> None:
    with Job(islands, [1, 130, 1023], digest_every=2, **how) as job:
        before = [shared_param.clone() for shared_param in job.shared_params(0)]
        for sync_round in range(6):
            job.compress(sync_round, k_blocks, scale=scale)
            if sync_round == 3:
                for engine in job.engines:
                    engine.accumulate(sync_round)
            else:
                job.apply(sync_round, clip_norm=1.0 if sync_round % 2 else 0.0)
            job.exchange()
            job.assert_equal_shared_params()
        assert not all(map(same_bits, before, job.shared_params(0)))
        digests = [sorted(engine.digests()) for engine in job.engines]
        assert [row[:2] for row in digests[0]] == [(sync_round, t) for sync_round in (0, 2, 4) for t in range(3)]
        assert all(row == digests[0] for row in digests)


@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("selection", ["threshold", "topk", "random"])
def test_what_is_sent_and_the_residual_are_all_there_was(values: Any, selection: Selection) -> None:
    """Also what 16 bits take away is residual, in an island's sum by its leader."""
    islands = [[0, 1], [2]]
    with Job(islands, [1023], values=values, selection=selection) as job:
        start = job.shared_params(0)[0].clone()
        came = torch.zeros(1023, dtype=torch.float64)
        for sync_round in range(8):
            for mine in job.compress(sync_round, 9):
                came += mine[0].double() / 3
            for engine in job.engines:
                engine.apply(sync_round, sync_round + 1, [(1.0, 0.0, 0.0, 0.0, 0.0)])
            job.exchange()
        applied = (start - job.shared_params(0)[0]).double()
        residual = torch.stack([tensors[0].residual.double() for tensors in job.of]).sum(0)
        torch.testing.assert_close(applied + residual, came, rtol=1e-4, atol=1e-4)


def test_without_error_feedback_nothing_is_left_in_the_residual() -> None:
    with Job([[0], [1]], [1023], error_feedback=False) as job:
        for sync_round in range(3):
            job.compress(sync_round, 5)
            job.apply(sync_round)
            job.exchange()
        assert not any(tensors[0].residual.any() for tensors in job.of)
        job.assert_equal_shared_params()


def test_an_island_of_one_sends_its_part_as_its_sum_and_mates_send_parts() -> None:
    with Job([[1, 0], [2]], [160], selection="topk") as job:
        job.compress(0, 3)
        job.apply(0)
        sent = [(sender, message.kind, message.sync_round, message.tensor) for sender, message in job.exchange()]
        assert sorted(sent) == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (2, 1, 0, 0)]
        own = job.engines[2].recent_parts()[0]
        assert own.index.shape == (3,)
        assert own.values.shape == (3, 16)


def test_one_rank_alone_sends_nothing() -> None:
    with Job([[0]], SIZES) as job:
        job.compress(0, ALL)
        job.apply(0)
        assert job.exchange() == []
        assert job.engines[0].versions() == [0, 0, 0]


def test_accumulated_passes_are_one_update_with_their_sum() -> None:
    accumulated, single = Job([[0], [1]], [1023], values="float32"), Job([[0], [1]], [1023], values="float32")
    with accumulated, single:
        summed = [torch.zeros(1023), torch.zeros(1023)]
        for sync_round in range(4):
            for rank, mine in enumerate(accumulated.compress(sync_round, ALL)):
                summed[rank] += mine[0]
            for engine in accumulated.engines:
                if sync_round < 3:
                    engine.accumulate(sync_round)
                else:
                    engine.apply(sync_round, 1, [RATES["sgd"]])
            accumulated.exchange()
            assert accumulated.engines[0].versions() == [sync_round]
        for rank, engine in enumerate(single.engines):
            engine.compress(0, 0, summed[rank], 0.5, ALL)
        single.apply(0)
        single.exchange()
        accumulated.assert_equal_shared_params()
        torch.testing.assert_close(accumulated.shared_params(1)[0], single.shared_params(1)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.5, 1e9])
def test_the_norm_of_all_tensors_together_is_clipped_as_torch_does(clip_norm: float) -> None:
    with Job([[0, 1], [2]], SIZES, values="float32") as job:
        expected = [shared_param.double().requires_grad_() for shared_param in job.shared_params(0)]
        gradients = job.compress(0, ALL)
        job.apply(0, clip_norm=clip_norm)
        job.exchange()
        for tensor, parameter in enumerate(expected):
            parameter.grad = torch.stack([g[tensor].double() for g in gradients]).mean(0)
        torch.nn.utils.clip_grad_norm_(expected, clip_norm)
        torch_optimizer("sgd", expected).step()
        for mine, plain in zip(job.shared_params(2), expected, strict=True):
            torch.testing.assert_close(mine.double(), plain.detach(), rtol=1e-5, atol=1e-6)


def test_with_clipping_every_update_waits_for_the_last_sum() -> None:
    with Job([[0], [1]], [160, 160]) as job:
        job.compress(0, ALL)
        job.apply(0, clip_norm=1.0)
        job.engines[1].idle(5)
        late = [message for message in job.engines[1].take_outgoing() if message.tensor == 0]
        job.engines[1].idle(5)
        job.engines[0].idle(5)
        assert job.engines[0].versions() == [-1, -1]
        assert job.deliver(1, late[0], 0) is None
        job.engines[0].idle(5)
        assert job.engines[0].versions() == [-1, -1]  # the other tensor's sum was lost on the way
        for tensor, missing in ((0, "the norm for clipping lacks 1 tensors"), (1, "sum of island 1 is missing")):
            with pytest.raises(DeadlineExceeded, match=f"tensor {tensor} waits for sync round 0: {missing}$"):
                job.engines[0].fetch([tensor], 0, 0)


def test_maximize_goes_the_other_way() -> None:
    down, up = Job([[0]], [100], values="float32"), Job([[0]], [100], values="float32")
    with down, up:
        down.compress(0, ALL)
        down.engines[0].apply(0, 1, [(0.1, 0.0, 0.0, 0.0, 0.0)])
        up.compress(0, ALL)
        up.engines[0].apply(0, 1, [(0.1, 0.0, 0.0, 0.0, 0.0)], maximize=True)
        down.exchange()
        up.exchange()
        start = normal(100, 77, 0)
        torch.testing.assert_close(
            up.shared_params(0)[0] - start, start - down.shared_params(0)[0], rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_live_weights_are_the_rounded_shared_params_after_a_fetch_and_not_before(dtype: torch.dtype) -> None:
    with Job([[0]], [1023, 100_000], live=dtype, selection="topk") as job:
        before = [tensors.live.clone() for tensors in job.of[0]]
        for sync_round in range(3):
            job.compress(sync_round, 20)
            job.apply(sync_round)
        job.exchange()
        assert all(torch.equal(tensors.live, old) for tensors, old in zip(job.of[0], before, strict=True))
        assert job.engines[0].fetch([0, 1], 1, 1)[:2] == (2, 2)
        for tensors in job.of[0]:
            assert torch.equal(tensors.live, tensors.shared_param.to(dtype))
        assert not torch.equal(job.of[0][1].live, before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_count_as_what_they_stand_for(dtype: torch.dtype) -> None:
    narrow, wide = Job([[0]], [1023], values="float32"), Job([[0]], [1023], values="float32")
    with narrow, wide:
        gradient = normal(1023, 3).to(dtype)
        narrow.engines[0].compress(0, 0, gradient, 0.7, 10)
        wide.engines[0].compress(0, 0, gradient.float(), 0.7, 10)
        narrow.apply(0)
        wide.apply(0)
        narrow.exchange()
        wide.exchange()
        assert same_bits(narrow.shared_params(0)[0], wide.shared_params(0)[0])
        assert same_bits(narrow.of[0][0].residual, wide.of[0][0].residual)


@pytest.mark.parametrize("selection", ["threshold", "topk", "random"])
@pytest.mark.parametrize("feedback", [True, False])
def test_a_round_without_gradient_sends_the_residual(selection: Selection, feedback: bool) -> None:
    with Job([[0, 1]], [100], selection=selection, values="float32", error_feedback=feedback) as job:
        gradients = [normal(100, rank) for rank in range(2)]
        for rank, engine in enumerate(job.engines):
            engine.compress(0, 0, gradients[rank], 0.5, 2)
            engine.compress(1, 0, torch.full((100,), torch.nan) if rank else None, 0.0, ALL)
            engine.apply(0, 1, [(1.0, 0.0, 0.0, 0.0, 0.0)])
            engine.apply(1, 2, [(1.0, 0.0, 0.0, 0.0, 0.0)])
        job.exchange()
        job.assert_equal_shared_params()
        if feedback:
            expected = normal(100, 77, 0) - torch.stack(gradients).mean(0)
            torch.testing.assert_close(job.shared_params(0)[0], expected, rtol=1e-5, atol=1e-6)
        assert job.engines[1].take_stats().nonfinite_blocks == 0


def test_a_gradient_with_nan_is_counted_and_harms_no_shared_param() -> None:
    with Job([[0], [1]], [160]) as job:
        bad = normal(160, 1)
        bad[17], bad[40] = torch.nan, torch.inf
        job.engines[0].compress(0, 0, bad, 0.5, ALL)
        job.engines[1].compress(0, 0, normal(160, 2), 0.5, ALL)
        job.apply(0)
        job.exchange()
        job.assert_equal_shared_params()
        assert job.shared_params(0)[0].isfinite().all()
        stats = job.engines[0].take_stats()
        assert (stats.nonfinite_blocks, stats.chosen_blocks, stats.all_blocks) == (2, 8, 10)


def test_sums_beyond_float32_stay_finite_and_equal() -> None:
    """1. Two ranks of an island send 3e38 each. 2. The sum must be able to travel on, and be equal everywhere."""
    with Job([[0, 1], [2]], [16], values="float32") as job:
        for rank, engine in enumerate(job.engines):
            gradient = torch.zeros(16)
            gradient[0] = 3e38 if rank < 2 else 1.0
            engine.compress(0, 0, gradient, 1.0, ALL)
            engine.apply(0, 1, [(1e-38, 0.0, 0.0, 0.0, 0.0)])
        job.exchange()
        job.assert_equal_shared_params()
        assert job.shared_params(0)[0].isfinite().all()
        assert float(job.shared_params(0)[0][0]) == pytest.approx(float(normal(16, 77, 0)[0]) - 3.4028, rel=1e-3)


def test_the_threshold_brings_the_chosen_blocks_to_the_number_asked_for() -> None:
    with Job([[0]], [320_000]) as job:
        chosen = []
        for sync_round in range(30):
            job.compress(sync_round, 200)
            job.apply(sync_round)
            job.exchange()
            stats = job.engines[0].take_stats()
            assert stats.chosen_blocks <= 200
            chosen.append(stats.chosen_blocks)
        assert sum(chosen[10:]) / len(chosen[10:]) > 150
        assert block_count(320_000) == stats.all_blocks


def test_momentum_of_missed_blocks_is_decayed_where_last_step_is_given() -> None:
    with Job([[0]], [32], values="float32", lazy=True, selection="topk") as job:
        engine, tensors = job.engines[0], job.of[0][0]
        for sync_round, block in enumerate([0, 1, 1, 0]):
            gradient = torch.zeros(32)
            gradient[16 * block : 16 * block + 16] = 1.0
            engine.compress(sync_round, 0, gradient, 1.0, 1)
            engine.apply(sync_round, sync_round + 1, [(0.1, 0.0, 0.5, 0.0, 0.0)])
        engine.idle(5)
        assert tensors.last_step is not None
        assert tensors.last_step.tolist() == [4, 3]
        assert float(tensors.first[0]) == 1 + 0.5 * 0.25 * 1  # two rounds missed, then one of momentum
        assert float(tensors.first[16]) == 1.5
