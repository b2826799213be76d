"""Two updates per batch, on ranks whose loaders look ahead differently far; on request rank 1 leaves between them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import atoll

directory, leave_at = Path(sys.argv[1]), int(sys.argv[2])
run = atoll.init(checkpoint_directory=directory, checkpoint_every=3)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
workers = run.rank if leave_at < 0 else 0
model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=4, num_workers=workers)
assert run._training is not None
assert run._training._plans._lead == (2 if leave_at < 0 else 0)
if leave_at < 0:
    assert loader.lead == 2 * run.rank  # nothing is drawn: no worker processes are started
    sys.exit(0)

pid = os.fork()
if pid == 0:
    sys.exit(7)  # runs exit handlers, which must leave the parent's run alone
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

for _ in run.epochs(1):
    for (x,) in loader:
        for part in range(2):
            if (run.rank, run.step, part) == (1, leave_at, 1):
                sys.exit(3)
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
