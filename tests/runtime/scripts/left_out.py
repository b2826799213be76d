"""Ranks of which one leaves updates out: python left_out.py OUT HOW ZERO. HOW: "scaler", a GradScaler after an overflow
on rank 1 in steps 3 and 8; "once", rank 1's script in step 3, which keeps its gradients; "always", rank 1's script.
ZERO: "before" or "after" an update gradients are set to zero. OUT/rank-R has the weights, and what with a scaler rank
R's gradients of its updates add up to, each weighted by its part of the batch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import atoll

LR = 0.01
out, how, zero = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
run = atoll.init(seed=1)
model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))
begun = [one.detach().clone() for one in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
generator = torch.Generator().manual_seed(2)
data = torch.utils.data.TensorDataset(torch.randn(96, 6, generator=generator), torch.randn(96, 1, generator=generator))
model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=8)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
summed = [torch.zeros_like(one, dtype=torch.float64) for one in model.parameters()]


def overflows() -> bool:
    return run.rank == 1 and (how == "always" or run.step == 3 or (how == "scaler" and run.step == 8))


for _ in run.epochs(2):
    for x, y in loader:
        if zero == "before":
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        if how == "scaler":
            run.backward(scaler.scale(loss * (float("inf") if overflows() else 1.0)))
            scaler.step(optimizer)
            scaler.update()
        else:
            run.backward(loss)
            if not overflows():
                optimizer.step()
        if how == "scaler" and not overflows():
            assert loader.current is not None
            for total, parameter in zip(summed, model.parameters(), strict=True):
                assert parameter.grad is not None
                total.add_(parameter.grad.double(), alpha=loader.current.weight)
        if zero == "after" and not (how == "once" and overflows()):
            optimizer.zero_grad()
weights = [one.detach() for one in model.parameters()]
torch.save(
    {"begun": begun, "weights": weights, "summed": summed, "scale": scaler.get_scale()}, out / f"rank-{run.rank}"
)
