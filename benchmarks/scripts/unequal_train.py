"""Submitted by benchmarks/unequal.py: trains for so many seconds, then writes the seconds of each step of rank 0."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn


def make() -> tuple[nn.Module, torch.utils.data.TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64 * 7 * 7, 320), nn.ReLU(), nn.Linear(320, 10)),
    )
    images = torch.randn(16384, 1, 28, 28)
    return model, torch.utils.data.TensorDataset(images, torch.randint(10, (16384,)))


def main() -> None:
    import atoll

    out, seconds = Path(sys.argv[1]), float(sys.argv[2])
    run = atoll.init(seed=1)
    model, dataset = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=256)
    took, before = [], time.perf_counter()
    ends = time.monotonic() + seconds
    for epoch in run.epochs(10_000):
        for inputs, labels in loader:
            run.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            took.append(now - before)
            before = now
        if run.is_main:
            out.write_text(json.dumps(took))
        done = torch.tensor([float(time.monotonic() > ends)])
        torch.distributed.all_reduce(done, op=torch.distributed.ReduceOp.MAX)  # all ranks end together
        if done.item() and epoch:
            break


if __name__ == "__main__":
    main()
