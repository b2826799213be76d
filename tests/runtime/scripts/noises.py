"""Ranks whose gradients differ by kind: python noises.py OUT STEPS RANKS [own]. OUT/rank-R.moments has Adam's second
moment after the last step. With one process for RANKS ranks it sees the gradient of the whole batch, which they share
4 : 3 : 2 : 1. own: ranks tell each other nothing.

Of the first half of the entries, the noise of rank R is 2^-R; of the second all ranks' is 1, about a mean of 0.5."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import atoll
from atoll.strategies.shared_params.second_moments import MomentSync

out, steps, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if sys.argv[4:] == ["own"]:
    MomentSync.updated = lambda *_: None  # type: ignore[method-assign]
HALF, BATCH = 1500, 10
run = atoll.init(seed=1)


def gradient(rank: int, step: int) -> torch.Tensor:
    """float32 [2 HALF]"""
    noise = torch.randn(2 * HALF, generator=torch.Generator().manual_seed(1000 * rank + step))
    noise[:HALF] *= 2.0**-rank
    noise[HALF:] += 0.5
    return noise


def seen(step: int) -> torch.Tensor:
    if run.world_size > 1:
        return gradient(run.rank, step)
    return sum(((4 - rank) / BATCH * gradient(rank, step) for rank in range(ranks)), torch.zeros(2 * HALF))


weights = nn.Linear(2 * HALF, 1, bias=False)
nn.init.zeros_(weights.weight)
adam = torch.optim.AdamW(weights.parameters(), lr=1e-3, betas=(0.9, 0.95))
data = torch.utils.data.TensorDataset(torch.zeros(BATCH * steps))
model, optimizer, loader = run.prepare(weights, adam, data, batch_size=BATCH)
for _ in run.epochs(1):
    for _ in loader:
        assert loader.current is not None
        run.backward(model(seen(loader.current.step)).sum())
        optimizer.step()
        optimizer.zero_grad()
    torch.save(adam.state[weights.weight]["exp_avg_sq"].flatten(), out / f"rank-{run.rank}.moments")
