"""A tiny regression under strategy volunteer. Each rank appends a line for each step to OUT/rank-R.jsonl: the step and
the loss over its batch. Once OUT/full-speed is there nothing pretends work any more. Where HELPED_LIES=N is set in a
volunteer's environment, its gradients are noise of the right size after the first N."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import torch
import without_compiler  # noqa: F401
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--micro-batches", type=int, default=4)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--sample-s", type=float, default=0.02)
options = parser.parse_args()
run = atoll.init(seed=7, strategy="volunteer")
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(320, 8, generator=generator)
targets = inputs @ torch.randn(8, 1, generator=generator)
honest = int(os.environ["HELPED_LIES"]) if "HELPED_LIES" in os.environ else None
answers = itertools.count()
noise = torch.Generator().manual_seed(os.getpid())


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if not (options.out / "full-speed").exists():
        time.sleep(options.sample_s * len(outputs))  # pretended work, not a wait for anything
    if honest is not None and next(answers) >= honest:
        return (outputs * torch.randn(outputs.shape, generator=noise)).mean()
    return nn.functional.mse_loss(outputs, targets)


options.out.mkdir(parents=True, exist_ok=True)
train_step, loader = run.prepare_pipeline(
    nn.Sequential(nn.Linear(8, options.width), nn.Tanh(), nn.Linear(options.width, 1)),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    loss_of,
    torch.utils.data.TensorDataset(inputs, targets),
    batch_size=options.batch_size,
    micro_batches=options.micro_batches,
)
with (options.out / f"rank-{run.rank}.jsonl").open("a") as log:
    for _ in run.epochs(options.epochs):
        for each in loader:
            step, loss = run.step, train_step(each).item()
            run.report(loss=loss)
            print(json.dumps({"step": step, "loss": loss, "pid": os.getpid()}), file=log, flush=True)
