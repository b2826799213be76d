"""Trains a small model in steps of STEP_S, and writes each step's number and its beginning, by the wall clock, to
OUT/RANK.

python membership_train.py OUT STEP_S. The script waits in place of computing: processors are free for the rest."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import atoll


def main() -> None:
    out, step_s = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    run = atoll.init(seed=1)
    data = torch.utils.data.TensorDataset(torch.randn(120_000, 32), torch.randn(120_000, 1))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=12)
    with (out / os.environ["ATOLL_RANK"]).open("a", buffering=1) as times:
        for _ in run.epochs(10):
            for inputs, targets in loader:
                times.write(f"{run.step} {time.time():.6f}\n")  # all before it are complete
                time.sleep(step_s)  # the pretended work
                run.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
