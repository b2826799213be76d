"""A toy local-update method of three members trains in real processes like plain PyTorch with the same averaging."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from zmq_agent import Start, torchrun_like

EVERY, BATCH, SHOWN_AFTER, EPOCHS, LOCAL_STEPS = 3, 12, 4, 2, 4
Weights = dict[str, torch.Tensor]


def averaged(models: list[nn.Sequential]) -> Weights:
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def by_hand(begin: Weights, world_size: int) -> tuple[Weights, Weights]:
    """Plain PyTorch: one model a rank, averaged every few updates. Returns what an evaluation shows, and the end."""
    first = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    first.load_state_dict(begin)
    models = [copy.deepcopy(first) for _ in range(world_size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
    targets, local, shown = inputs.sum(1, keepdim=True), BATCH // world_size, {}
    for step in range(EPOCHS * LOCAL_STEPS):
        begins = step % LOCAL_STEPS * BATCH
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = slice(begins + rank * local, begins + (rank + 1) * local)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            mean = averaged(models)
            for model in models:
                model.load_state_dict(mean)
        if step + 1 == SHOWN_AFTER:
            shown = averaged(models)
    return shown, averaged(models)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_toy_method_trains_as_plain_pytorch_does(tmp_path: Path, start: Start, world_size: int) -> None:
    """1. Ranks step alone and average every 3 updates. 2. An evaluation after the fourth shows the average, and leaves
    each rank its own weights. 3. The end of training averages once more."""
    codes = torchrun_like("averaging.py", str(tmp_path), world_size=world_size, start=start)
    assert codes == [0] * world_size
    found = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(world_size)]
    shown, end = by_hand(found[0]["begin"], world_size)
    for kept in found:
        torch.testing.assert_close(kept["shown"], shown)
        torch.testing.assert_close(kept["end"], end)
    assert any(not torch.equal(found[0]["own"][name], found[1]["own"][name]) for name in end)
