"""The noise of a worker's own gradients: what the halves of its batch tell."""

from __future__ import annotations

import copy
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.step.backward import half_batches
from atoll.agent.runtime.step.backward.half_batches import HalfBatches
from atoll.agent.runtime.strategy_interface.capabilities import Norms

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


class Wrapped(nn.Linear):
    """A layer of the user's own that takes and gives what it likes, and is a Linear to others."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        taken = [one for one in (*args, *kwargs.values()) if torch.is_tensor(one) and one.is_floating_point()]
        last = taken[-1] if taken else torch.ones(4, 6)
        dense = last.to_dense() if last.is_sparse else last.reshape(-1, 6)
        return super().forward(dense)


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "keyword": lambda layer, x: layer(input=x),
    "another keyword": lambda layer, x: layer(words=x),
    "no arguments": lambda layer, x: layer(),
    "None": lambda layer, x: layer(None),
    "tuple": lambda layer, x: layer((x, x)),
    "dict": lambda layer, x: layer({"x": x}),
    "nested list": lambda layer, x: layer([[x], x]),
    "text": lambda layer, x: layer("words"),
    "integers": lambda layer, x: layer(torch.arange(4)),
    "integers first": lambda layer, x: layer(torch.arange(4), x),
    "no dimensions": lambda layer, x: layer(torch.tensor(2.0), x),
    "one sample without a batch": lambda layer, x: layer(x[0]),
    "sparse": lambda layer, x: layer(x.to_sparse()),
    "nested tensor": lambda layer, x: layer(torch.nested.nested_tensor([x, x], layout=torch.jagged), x),
    "empty": lambda layer, x: layer(x[:0]),
    "another batch": lambda layer, x: layer(x[:3]),
    "other rows than given": lambda layer, x: layer(torch.cat([x, x])[None]),
    "a lazy view": lambda layer, x: layer(x.t().t()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_whatever_a_layer_is_called_with_the_pass_is_the_users(
    call: Callable[[nn.Module, torch.Tensor], Any],
) -> None:
    """The outputs and gradients are those of a model that nothing measures; a square layer, so that features may be
    taken for samples."""
    torch.manual_seed(5)
    layer, x = Wrapped(6, 6), torch.randn(4, 6)
    expected = call(layer, x)
    expected.square().sum().backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    said: list[str] = []
    halves = HalfBatches(layer, 1, lambda: batch_slice(4), said.append)
    found = call(layer, x)
    found.square().sum().backward()
    halves.take()
    halves.close()
    assert torch.equal(found, expected)
    assert gradient is not None
    assert torch.equal(layer.weight.grad, gradient)  # type: ignore[arg-type]
    assert said == []


def test_a_layer_called_by_keyword_is_measured_too() -> None:
    model, x, batch = Wrapped(6, 6), torch.randn(4, 6), batch_slice(4)
    halves = HalfBatches(model, 1, lambda: batch)
    norms = []
    for call in (lambda: model(x), lambda: model(input=x)):
        call().square().sum().backward()
        norms.append(halves.take())
    assert norms[0] == norms[1] != Norms()
    halves.close()


@pytest.mark.parametrize("where", ["_watch", "_add"])
def test_measuring_that_fails_is_told_once_and_ends_for_its_layer_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Forward or backward, measuring the first two of three layers raises. 2. The pass has its gradients, one notice
    names the first layer, and the third is measured. 3. The failed ones have no hook more."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(4, 6)
    real, said = getattr(HalfBatches, where), list[str]()

    def failing(self: HalfBatches, number: int, *args: Any) -> None:
        if number < 2:
            raise IndexError("tuple index out of range")
        real(self, number, *args)

    monkeypatch.setattr(HalfBatches, where, failing)
    halves = HalfBatches(model, 1, lambda: batch_slice(4), said.append)
    for _ in range(2):
        model(x).square().sum().backward()
        assert halves.take() != Norms()
    assert [len(layer._forward_hooks) for layer in model] == [0, 0, 1]
    assert len(said) == 1
    assert "layer 0" in said[0] or "layer 1" in said[0]
    halves.close()


def test_a_copy_of_a_model_that_is_measured_has_no_part_in_it() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6)), torch.randn(4, 6)
    halves = HalfBatches(model, 1, lambda: batch_slice(4))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        copied(x).square().sum().backward()
        assert halves.take() == Norms()
    model(x).square().sum().backward()
    assert halves.take() != Norms()
    halves.close()
