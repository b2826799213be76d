"""Strategy stale-sparse with its weights on a GPU. Skipped aloud where there is none."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

import atoll

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: stale-sparse was NOT trained on a device"),
]


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_it_learns_and_ends_with_its_shared_params(
    exchange: Literal["updates", "gradients"], dtype: torch.dtype
) -> None:
    """Weights of 41 and of 1,640 entries: their last blocks are shorter."""
    inputs = torch.randn(60, 41, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1] * 2)
    run = atoll.init(seed=5, strategy=atoll.StaleSparse(exchange=exchange, sparsity=0.5))
    try:
        model = nn.Sequential(nn.Linear(41, 40), nn.Tanh(), nn.Linear(40, 1)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=10)
        assert all(one.device.type == "cuda" for one in model.parameters())
        losses = []
        for _ in run.epochs(20):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert sum(losses[-6:]) < 0.3 * sum(losses[:6])
        run.synchronize()
        assert run._training is not None
        shared_params = run._training._current.driver.durable.shared_params()
        for one in model.parameters():
            assert torch.equal(one.detach().cpu(), shared_params[id(one)].to(dtype))
    finally:
        run.close()
