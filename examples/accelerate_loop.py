"""A loop of Accelerate's on Atoll's data plane.

atoll submit examples/accelerate_loop.py --workers 2:4 --follow
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from atoll.adapters import accelerate as adapter

run = adapter.join(seed=3)  # before Accelerator()

from accelerate import Accelerator  # noqa: E402

inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accelerator = Accelerator(cpu=run.device.type == "cpu")
model, optimizer, loader = adapter.prepare(
    run, accelerator, model, optimizer, DataLoader(data, batch_size=32, shuffle=True)
)
for _ in run.epochs(3):
    for batch, targets in loader:
        loss = nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    run.report(loss=loss.item())
