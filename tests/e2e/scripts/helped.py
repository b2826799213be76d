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
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--micro-batches", type=int, default=4)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--sample-s", type=float, default=0.02)
parser.add_argument("--split-at", nargs="*", default=["3"])
parser.add_argument("--clip", type=float)
options = parser.parse_args()
run = atoll.init(seed=7, strategy="volunteer")
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(320, 8, generator=generator)
targets = inputs @ torch.randn(8, 1, generator=generator)
honest = int(os.environ["HELPED_LIES"]) if "HELPED_LIES" in os.environ else None
noise = torch.Generator().manual_seed(os.getpid())


class Paced(nn.Module):
    """Half of the pretended work, not a wait for anything; and of the lies."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = itertools.count()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not (options.out / "full-speed").exists():
            time.sleep(options.sample_s / 2 * len(inputs))
        if honest is not None and next(self.passes) >= honest:
            return inputs * torch.randn(inputs.shape, generator=noise)
        return inputs


options.out.mkdir(parents=True, exist_ok=True)
train_step, loader = run.prepare_pipeline(
    nn.Sequential(Paced(), nn.Linear(8, options.width), nn.Tanh(), Paced(), nn.Linear(options.width, 1)),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    nn.functional.mse_loss,
    torch.utils.data.TensorDataset(inputs, targets),
    batch_size=options.batch_size,
    micro_batches=options.micro_batches,
    split_at=options.split_at,
    clip_norm=options.clip,
)
with (options.out / f"rank-{run.rank}.jsonl").open("a") as log:
    for _ in run.epochs(options.epochs):
        for each in loader:
            step, loss = run.step, train_step(each).item()
            run.report(loss=loss)
            line = {"step": step, "loss": loss, "pid": os.getpid(), "at_s": time.monotonic()}
            print(json.dumps(line), file=log, flush=True)
