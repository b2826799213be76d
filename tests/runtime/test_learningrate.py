"""The factor on learning rates, with torch's own optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.agent.runtime.step.update_hooks import LearningRate, register_first

Make = Callable[[nn.Module], torch.optim.Optimizer]
FACTOR = 1.7


def groups(model: nn.Module) -> torch.optim.Optimizer:
    weight, bias = model.parameters()
    of_its_own = {"params": [weight], "lr": 0.3, "weight_decay": 0.1}
    return torch.optim.SGD([of_its_own, {"params": [bias]}], lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "groups": groups,
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "tensor": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "fused, tensor": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), fused=True),
}


def train(make: Make, steps: int, step: Callable[[torch.optim.Optimizer, Callable[[], None]], None]) -> list[float]:
    """step(optimizer, a closure that makes one update). Returns the parameters."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = make(model)

    def update() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()

    for _ in range(steps):
        step(optimizer, update)
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_one_with_the_multiplied_rates_to_the_bit(name: str) -> None:
    """And before and after it the rates are the very objects that the script set."""

    def by_hand(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        own = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * FACTOR
        update()
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr

    def with_factor(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        rate = LearningRate(optimizer)
        own = [group["lr"] for group in optimizer.param_groups]
        hooks = register_first(optimizer, lambda *_: rate.multiply(FACTOR), lambda *_: rate.restore())
        update()
        for hook in hooks:
            hook.remove()
        assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, own, strict=True))

    plain = train(OPTIMIZERS[name], 4, lambda _, update: update())
    assert train(OPTIMIZERS[name], 4, with_factor) == train(OPTIMIZERS[name], 4, by_hand) != plain


def test_a_scheduler_that_steps_in_a_hook_goes_on_from_the_scripts_rate() -> None:
    optimizer = OPTIMIZERS["sgd"](nn.Linear(3, 2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    rate = LearningRate(optimizer)
    register_first(optimizer, lambda *_: rate.multiply(FACTOR), lambda *_: rate.restore())
    for power in range(1, 4):
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**power


def test_a_step_that_raises_leaves_no_factor_for_the_next() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    rate = LearningRate(optimizer)
    seen: list[float] = []
    register_first(optimizer, lambda *_: rate.multiply(2.0), lambda *_: rate.restore())
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))

    def fail() -> torch.Tensor:
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        optimizer.step(fail)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert seen == [1.0, 1.0]
    assert parameter.tolist() == [0.0, 0.0]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_rate_that_was_set_meanwhile_stays_and_a_group_without_one_is_let_be() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    rate = LearningRate(optimizer)
    del optimizer.param_groups[0]["lr"]
    rate.multiply(2.0)
    assert "lr" not in optimizer.param_groups[0]
    optimizer.param_groups[0]["lr"] = 0.5
    rate.multiply(2.0)
    optimizer.param_groups[0]["lr"] = 0.25
    rate.restore()
    assert optimizer.param_groups[0]["lr"] == 0.25
