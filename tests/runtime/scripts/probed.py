"""A small regression that writes the digest of its weights at the start of each batch: OUT/weights-R.jsonl."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

import atoll

out = Path(sys.argv[1])
run = atoll.init(seed=7, strategy="dense", checkpoint_directory=out / "checkpoints", checkpoint_every=1)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(100, 8, generator=generator)
targets = inputs @ torch.randn(8, 1, generator=generator)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
dataset = torch.utils.data.TensorDataset(inputs, targets)
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=50)
with (out / f"weights-{run.rank}.jsonl").open("w", buffering=1) as log:
    for _ in run.epochs(5):
        for x, y in loader:
            weights = torch.cat([one.detach().flatten() for one in model.parameters()])
            log.write(json.dumps(sha256(weights.numpy().tobytes()).hexdigest()) + "\n")
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(loss)
            run.clip_grad_norm(5.0)
            optimizer.step()
            optimizer.zero_grad()
(out / "went-on").touch()
