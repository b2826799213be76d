"""The noise of a worker's own gradients: what the halves of its batch tell."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.step.backward import half_batches
from atoll.agent.runtime.step.backward.half_batches import HalfBatches
from atoll.agent.runtime.step.capabilities import Norms

SAMPLES = 7


class Tokens(nn.Module):
    """[B, T, D] in; the second layer sees [B T, D], as heads do, and is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = nn.functional.relu(self.first(x)).reshape(-1, 8)
        return self.second(self.second(flat).tanh()).reshape(len(x), -1)  # type: ignore[no-any-return]


def batch_slice(local: int) -> BatchSlice:
    return BatchSlice(step=0, epoch=0, start=0, total=local, local=local, weight=1.0, share=1.0)


def told(model: nn.Module, x: torch.Tensor, batch: BatchSlice | None = None, seed: int = 1) -> Norms:
    halves = HalfBatches(model, seed, lambda: batch or batch_slice(len(x)))
    try:
        model.zero_grad()
        model(x).square().mean().backward()
        return halves.take()
    finally:
        halves.close()


def gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of the weights that are looked at, all of them."""
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([one.grad.reshape(-1) for name, one in model.named_parameters() if "weight" in name])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 3)), (6,)),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2)), (2, 7, 7)),
        (Tokens, (5, 6)),
    ],
)  # fmt: skip
def test_with_all_rows_both_halves_are_those_of_passes_of_their_own(
    make: Callable[[], nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Halves of three and four samples, of one pass. 2. They are what autograd says of each alone, and together what
    it says of all."""
    monkeypatch.setattr(half_batches, "SHARE", 1.0)
    torch.manual_seed(3)
    model, x = make(), torch.randn(SAMPLES, *shape)
    found = told(model, x)
    first, second, whole = (gradient(model, part) for part in (x[:3], x[3:], x))
    assert found.halves
    assert found.local == pytest.approx(float(3 * first @ first + 4 * second @ second) / 7, rel=1e-4)
    assert found.together == pytest.approx(float(whole @ whole), rel=1e-4)


def test_a_few_rows_stand_for_all_without_bias() -> None:
    """Of 300 choices of eight rows out of 900, the mean is what all rows say."""
    torch.manual_seed(4)
    model, x = nn.Linear(6, 900), torch.randn(SAMPLES, 6) * torch.arange(1, 7)
    whole = gradient(model, x)
    found = [told(model, x, seed=seed).together for seed in range(300)]
    standard_error = statistics.stdev(found) / len(found) ** 0.5
    assert abs(statistics.fmean(found) - float(whole @ whole)) < 3 * standard_error


def test_what_cannot_be_halved_says_nothing() -> None:
    """One sample; samples that are not the first dimension; a model without a layer whose halves are known."""
    assert told(nn.Linear(6, 3), torch.randn(1, 6)) == Norms()
    assert told(nn.Linear(6, 3), torch.randn(5, 6), batch_slice(3)) == Norms()
    assert told(nn.Sequential(nn.LayerNorm(6)), torch.randn(4, 6)) == Norms()


def test_passes_that_are_not_trained_and_steps_that_are_not_sampled_are_left_alone() -> None:
    """1. Validation inside a sampled step. 2. A step between: the model's output has no hook more than without."""
    model, x, batch = nn.Linear(6, 3), torch.randn(4, 6), batch_slice(4)
    sampled: list[BatchSlice | None] = [batch]
    halves = HalfBatches(model, 1, lambda: sampled[0])
    with torch.no_grad():
        model(x)
    assert halves.take() == Norms()
    sampled[0] = None
    assert model(x)._backward_hooks is None
    halves.close()
