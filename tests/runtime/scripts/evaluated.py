"""Trains two epochs, and after each evaluates 23 numbered samples with the other ranks: OUT/rank-R.json says who saw
which and what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import atoll
from atoll.errors import BadInput

out = Path(sys.argv[1])
run = atoll.init(seed=3)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(36, 4, generator=torch.Generator().manual_seed(1)))
model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=12)
held_out = run.evaluation_loader(TensorDataset(torch.arange(23)), batch_size=4)
seen, told = [], []
for _ in run.epochs(2):
    for (inputs,) in loader:
        run.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mine = torch.cat([numbers for (numbers,) in held_out] or [torch.empty(0, dtype=torch.int64)])
    assert len(held_out) == -(-len(mine) // 4)
    gathered, (count,) = run.gather(mine), run.sum(len(mine))
    ranks = run.gather(torch.tensor(float(run.rank), dtype=torch.bfloat16))
    seen.append(mine.tolist())
    told.append([gathered.tolist(), count, ranks.tolist()])
try:
    run.gather(torch.zeros(2, 3 + run.rank))
except BadInput as error:
    told.append(str(error))
(out / f"rank-{run.rank}.json").write_text(json.dumps({"job": run.job, "seen": seen, "told": told}))
