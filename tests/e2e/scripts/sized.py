"""A layer of --entries parameters and a pretended step of --step-s: its gradients take as long as the link lets them.

Each rank appends a line per step to OUT/rank-R.jsonl: {"step", "at", "ids"}. The epoch ends once OUT/enough exists."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--entries", type=int, default=500_000)
parser.add_argument("--step-s", type=float, default=0.3)
options = parser.parse_args()

run = atoll.init(seed=7)
width = 100
torch.manual_seed(3)
inputs = torch.randn(1200, width)
targets = inputs @ torch.randn(width, 1)
dataset = torch.utils.data.TensorDataset(inputs, targets, torch.arange(len(inputs)))
hidden = options.entries // (width + 2)
model = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=12)

options.out.mkdir(parents=True, exist_ok=True)
with (options.out / f"rank-{run.rank}.jsonl").open("a") as log:
    for epoch in run.epochs(1000):
        for x, y, ids in loader:
            time.sleep(options.step_s)  # pretended work, not a wait for anything
            loss = nn.functional.mse_loss(model(x), y)
            step = loader.current.step
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.report(loss=loss.item())
            log.write(json.dumps({"step": step, "epoch": epoch, "at": time.time(), "ids": ids.tolist()}) + "\n")
            log.flush()
        if any(run.sum(float((options.out / "enough").exists()))):
            break
