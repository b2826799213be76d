"""A tiny script for `atoll profile`: a regression on 240 samples. FAIL_AT in its environment."""

from __future__ import annotations

import os

import torch
import without_compiler  # noqa: F401
from torch import nn

import atoll

run = atoll.init(seed=1, checkpoint_directory="never-made", checkpoint_every=1)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(240, 8, generator=generator)
targets = inputs @ torch.randn(8, 1, generator=generator) + 0.5
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
dataset = torch.utils.data.TensorDataset(inputs, targets)
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=64)
for _ in run.epochs(4):
    for x, y in loader:
        if loader.current.step == int(os.environ.get("FAIL_AT", "-1")):
            raise RuntimeError("the script's own fault")
        loss = nn.functional.mse_loss(model(x), y)
        run.backward(loss)
        run.clip_grad_norm(10.0)
        optimizer.step()
        optimizer.zero_grad()
    run.report(loss=loss.item())
print("trained to the end", flush=True)
