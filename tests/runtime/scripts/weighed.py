"""Ranks pull one layer in opposite directions, rank 0 down: python weighed.py OUT. OUT/rank-R has the layer's weights
after one update by Adam, of a batch of 50 samples, and a synchronization."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import atoll

run = atoll.init(seed=1)
model = nn.Linear(40, 3, bias=False)
nn.init.zeros_(model.weight)
adam, data = torch.optim.Adam(model.parameters(), lr=0.05), torch.utils.data.TensorDataset(torch.ones(50, 40))
model, optimizer, loader = run.prepare(model, adam, data, batch_size=50)
for _ in run.epochs(1):
    for (x,) in loader:
        run.backward((1 if run.rank == 0 else -1) * model(x).sum(dim=1).mean())
        optimizer.step()
        optimizer.zero_grad()
torch.save(model.weight.detach(), Path(sys.argv[1]) / f"rank-{run.rank}")
