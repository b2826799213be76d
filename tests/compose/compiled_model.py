"""Trains a compiled model in a worker inside the image, and checks it against the same model as it is.

Where torch.compile finds no compiler, no Python.h or no folder that lets it load what it compiled, it raises.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from torch import nn

import atoll

STEPS = 5

run = atoll.init(seed=1)
torch.manual_seed(1)
inputs = torch.randn(STEPS * 32, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
plain = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 1))
expected_model = copy.deepcopy(plain)
model = torch.compile(plain, fullgraph=True)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
expected_optimizer = torch.optim.SGD(expected_model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=32)

for _ in run.epochs(1):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected_loss = nn.functional.mse_loss(expected_model(x), y)
        expected_loss.backward()
        expected_optimizer.step()
        expected_optimizer.zero_grad()
        torch.testing.assert_close(loss, expected_loss)
    run.report(loss=loss.item())

libraries = list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))
if not libraries:
    raise SystemExit("nothing was compiled")
print(f"compiled {len(libraries)} libraries, losses equal those of the model as it is")
