"""The script of a drill: a small regression, the same bits every time, paced so that a strike hits a step under way."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from drill.recording import Recorder
from torch import nn

import atoll

SAMPLES = 1200
BATCH = 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.1, help="pretended work per step and worker")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = atoll.init()
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 32, generator=generator)
    targets = torch.sin(inputs @ torch.randn(32, 1, generator=generator))
    dataset = torch.utils.data.TensorDataset(inputs, targets, torch.arange(SAMPLES))
    model = nn.Sequential(
        nn.Linear(32, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=BATCH)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.track("scaler", scaler)
    with Recorder(options.out, run.rank, model) as recorder:
        for epoch in run.epochs(options.epochs):
            for x, y, ids in loader:
                if recorder.paced:
                    time.sleep(options.step_s)  # pretended work, not a wait for anything
                loss = nn.functional.mse_loss(model(x), y)
                batch_slice = loader.current
                assert batch_slice is not None
                recorder.step(batch_slice.step, epoch, ids.tolist() if batch_slice.local and batch_slice.weight else [])
                run.backward(scaler.scale(loss * math.inf if recorder.overflows(batch_slice.step) else loss))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            run.report(loss=loss.item())
        recorder.finished(run.step)


if __name__ == "__main__":
    main()
