"""A model for benchmarks/advise.py: rank 0 prints the seconds of each of STEPS steps, as JSON. STRATEGY trains it."""

from __future__ import annotations

import json
import os
import time

import torch
from torch import nn

import atoll

SAMPLES, WIDTH, BATCH = 8192, 768, 128


def main() -> None:
    run = atoll.init(seed=7, strategy=os.environ.get("STRATEGY", "dense"))
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=BATCH)
    steps, seconds = int(os.environ.get("STEPS", "1000")), []
    before_s = time.perf_counter()
    for _ in run.epochs(1000):
        for x, y in loader:
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            now_s = time.perf_counter()
            seconds.append(now_s - before_s)
            before_s = now_s
            if len(seconds) == steps:
                run.end_training()
                break
    if run.is_main:
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
