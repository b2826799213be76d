"""Trains BatchNorm1d on two ranks with SAMPLES samples in batches of 4, and writes what each rank trained."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import atoll
from atoll.errors import BadInput

out, samples = Path(sys.argv[1]), int(sys.argv[2])
run = atoll.init(seed=7)
model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(samples, 8, generator=torch.Generator().manual_seed(3)))
model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=4)
said = out / f"rank-{run.rank}"
try:
    for _ in run.epochs(1):
        for (x,) in loader:
            with said.open("a") as log:
                log.write(f"{len(x)}:{loader.current.local} ")
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
except BadInput as error:
    said.write_text(str(error))
    sys.exit(2)
