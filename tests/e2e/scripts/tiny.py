"""A tiny regression whose every trained sample is written down, for checking that each counted exactly once.

Each rank appends one line per trained batch to OUT/run-N-rank-R.jsonl: {"step", "epoch", "ids", "loss"}.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=600)
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--step-s", type=float, default=0.02, help="pretended work per step and worker")
parser.add_argument("--dropout", type=float, default=0.1)
options = parser.parse_args()

run = atoll.init(seed=7)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(options.samples, 8, generator=generator)
targets = inputs @ torch.randn(8, 1, generator=generator)
dataset = torch.utils.data.TensorDataset(inputs, targets, torch.arange(options.samples))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=options.batch_size)

options.out.mkdir(parents=True, exist_ok=True)
with (options.out / f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{run.rank}.jsonl").open("a") as log:
    for epoch in run.epochs(options.epochs):
        for x, y, ids in loader:
            time.sleep(options.step_s)  # this is the pretended work, not a wait for anything
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            cut = loader.current
            trained = ids.tolist() if cut.local else []
            line = {
                "step": cut.step,
                "epoch": epoch,
                "ids": trained,
                "loss": loss.item(),
                "weight": cut.weight,
                "at": time.time(),
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            run.report(loss=loss.item())
if run.is_main:
    digest = torch.cat([p.detach().flatten() for p in model.parameters()])
    (options.out / "final.json").write_text(json.dumps({"step": run.step, "weights": digest.tolist()}))
    print("trained to the end", flush=True)
