"""Trains an MLP with AdamW in steps of about STEP_S, and writes each step's number and its beginning, by the wall
clock, to OUT/RANK.

python strategy_switch_train.py OUT STEP_S HIDDEN."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import atoll


def main() -> None:
    out, step_s, hidden = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    run = atoll.init(seed=1)
    data = torch.utils.data.TensorDataset(torch.randn(120_000, 32), torch.randn(120_000, 1))
    model = nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=16)
    with (out / os.environ["ATOLL_RANK"]).open("a", buffering=1) as times:
        for _ in run.epochs(10):
            for inputs, targets in loader:
                times.write(f"{run.step} {time.time():.6f}\n")  # all before it are complete
                time.sleep(step_s)  # the pretended work
                loss = nn.functional.mse_loss(model(inputs), targets)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.report(loss=loss.item())


if __name__ == "__main__":
    main()
