"""Ranks pull one layer in opposite directions, rank 0 down: python weighed.py OUT OPTIMIZER STEPS. OUT/rank-R has the
layer's weights after the last step and a synchronization, for batches of 100 samples."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import atoll

out, family, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
run = atoll.init(seed=1)
model = nn.Linear(40, 3, bias=False)
nn.init.zeros_(model.weight)
optimizers = {
    "adam": torch.optim.Adam(model.parameters(), lr=0.05),
    "sgd": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
}
data = torch.utils.data.TensorDataset(torch.ones(100 * steps - 50, 40))
model, optimizer, loader = run.prepare(model, optimizers[family], data, batch_size=100)
for _ in run.epochs(1):
    for (x,) in loader:
        run.backward((1 if run.rank == 0 else -1) * model(x).sum(dim=1).mean())
        optimizer.step()
        optimizer.zero_grad()
torch.save(model.weight.detach(), out / f"rank-{run.rank}")
