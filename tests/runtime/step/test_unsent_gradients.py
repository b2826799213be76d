"""Gradients that a strategy had not sent when the run left it: each counts once, in its parameter's next update."""

from __future__ import annotations

import torch
from torch import nn

from atoll.agent.runtime.model.durable import UNSENT_MOMENTUM, Handover, Origin
from atoll.agent.runtime.step.state.strategy_change import UnsentGradients, handed_momentum


def handed(**unsent: torch.Tensor) -> Handover:
    return Handover(Origin(1, 1, 5, 2, {}), {name.replace("_", "."): one for name, one in unsent.items()})


def test_what_was_not_sent_is_in_the_next_update_and_in_no_other() -> None:
    """1. A layer's gradient comes, a frozen one's does not. 2. The update has both gradients of the first, as plain SGD
    has their sum. 3. The second one's waits until it trains again. An update that raised is made once more."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
    first, second = model[0].weight, model[1].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    begun = first.detach().clone()
    unsent = UnsentGradients(model)
    unsent.put(handed(**{"0_weight": torch.arange(6.0), "1_weight": torch.ones(2)}))
    for _ in range(2):  # the first of them raises
        first.grad, second.grad = torch.full((2, 3), 2.0), None
        unsent.add_to(optimizer)
        assert torch.equal(first.grad, torch.arange(6.0).view(2, 3) + 2.0)
    optimizer.step()
    unsent.applied()
    assert torch.equal(first, begun - 0.5 * (torch.arange(6.0).view(2, 3) + 2.0))
    first.grad, second.grad = torch.zeros(2, 3), torch.zeros(1, 2)
    unsent.add_to(optimizer)
    unsent.applied()
    assert torch.equal(first.grad, torch.zeros(2, 3))
    assert torch.equal(second.grad, torch.ones(1, 2))


def test_momentum_of_what_was_not_sent_ends_with_its_strategy() -> None:
    model = nn.Linear(2, 1, bias=False)
    handed_over = handed(**{"weight": torch.zeros(2), f"{UNSENT_MOMENTUM}weight": torch.ones(2)})
    assert handed_momentum(handed_over)
    unsent, optimizer = UnsentGradients(model), torch.optim.SGD(model.parameters(), lr=0.5)
    unsent.put(handed_over)
    model.weight.grad = torch.zeros(1, 2)
    unsent.add_to(optimizer)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))


def test_a_fused_optimizer_that_divides_by_a_scale_gets_it_scaled() -> None:
    model = nn.Linear(2, 1, bias=False)
    unsent, optimizer = UnsentGradients(model), torch.optim.SGD(model.parameters(), lr=0.5)
    unsent.put(handed(weight=torch.ones(2)))
    model.weight.grad = torch.zeros(1, 2)
    optimizer.grad_scale = torch.tensor(1024.0)  # as torch.amp.GradScaler sets it
    unsent.add_to(optimizer)
    assert torch.equal(model.weight.grad, torch.full((1, 2), 1024.0))
