"""Accumulates gradients whose noise scale is known: python known_noise.py HOW STEPS, HOW "every-pass" or "no-sync".

A sample's gradient is the sample itself, of 200 entries with variance 1 about a mean of squared norm 10: the noise
scale is 200 / 10 = 20 samples, whatever the weights are."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from torch import nn

import atoll

ENTRIES, SQUARED_MEAN, BATCH, BATCHES = 200, 10.0, 16, 4
how, steps = sys.argv[1], int(sys.argv[2])
run = atoll.init(seed=1)
generator = torch.Generator().manual_seed(5)
samples = torch.randn(BATCH * steps, ENTRIES, generator=generator) + (SQUARED_MEAN / ENTRIES) ** 0.5
weights = nn.Linear(ENTRIES, 1, bias=False)
adam = torch.optim.AdamW(weights.parameters(), lr=1e-3)
model, optimizer, loader = run.prepare(weights, adam, torch.utils.data.TensorDataset(samples), batch_size=BATCH)
for _ in run.epochs(1):
    for number, (x,) in enumerate(loader, start=1):
        last = number % BATCHES == 0 or run.last_batch
        with nullcontext() if last or how == "every-pass" else run.no_sync():
            run.backward(model(x).mean() / BATCHES)
        if last:
            optimizer.step()
            optimizer.zero_grad()
