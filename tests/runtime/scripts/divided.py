"""Trains a few steps, whose batches a plan may divide into several passes, and saves what training ended with.

python divided.py OUT [--adam] [--clip] [--scaler] [--scheduler] [--averaged] [--own-backward] [--counts]
    [--accumulates] [--untold]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import atoll

out, options = Path(sys.argv[1]), set(sys.argv[2:])
run = atoll.init(seed=3)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(100, 6, generator=generator)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
make = torch.optim.AdamW if "--adam" in options else torch.optim.SGD
optimizer = make(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if "--scheduler" in options else None
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
if "--averaged" in options:
    run.track("average", average)
told = scheduler if "--untold" not in options else None
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=24, scheduler=told)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled="--scaler" in options)
batches = []
for _ in run.epochs(2):
    for number, (x, y) in enumerate(loader):
        batches.append(loader.current.local)
        loss = nn.functional.mse_loss(model(x), y)
        if "--own-backward" in options:
            scaler.scale(loss).backward()
        else:
            run.backward(scaler.scale(loss), **({"weight": 2.0 * len(x)} if "--counts" in options else {}))
        if "--accumulates" in options and number % 2 == 0:
            continue
        if "--clip" in options:
            scaler.unscale_(optimizer)
            run.clip_grad_norm(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if "--averaged" in options:
            average.update_parameters(model)
weights = [one.detach() for one in model.parameters()]
ended = {
    "weights": weights,
    "average": [one.detach() for one in average.parameters()],
    "rate": optimizer.param_groups[0]["lr"],
    "scale": scaler.get_scale(),
}
torch.save(ended, out / f"rank-{run.rank}.end")
(out / f"rank-{run.rank}.json").write_text(json.dumps(batches))
