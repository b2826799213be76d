"""A regression on devices that hold only so many samples: a pass of more raises torch.OutOfMemoryError.

Each rank appends one line per batch to OUT/run-N-rank-R.jsonl before it is trained, as tiny.py does. At the end rank 0
writes OUT/final.json: {"weights", "steps"}. --raises-in says where memory runs out: in the script, in the model's
forward pass or in the backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--holds", type=int, nargs="+", default=[150], help="samples of each rank, or of all")
parser.add_argument("--raises-in", choices=("script", "forward", "backward"), default="script")
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--steps", type=int, default=60, help="of the whole batch")
parser.add_argument("--sample-s", type=float, default=0.0004, help="pretended work per sample")
parser.add_argument("--sample-floats", type=int, default=0, help="that each sample keeps until its backward pass")
parser.add_argument("--scheduler", action="store_true")
options = parser.parse_args()

rank = int(os.environ.get("ATOLL_RANK", os.environ.get("RANK", "0")))
holds = options.holds[min(rank, len(options.holds) - 1)]


def overflow(samples: int) -> None:
    if samples > holds:
        raise torch.OutOfMemoryError(f"CUDA out of memory. {samples} samples do not fit, {holds} do")


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        overflow(len(gradient))
        return gradient


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones(len(x), options.sample_floats))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if options.raises_in == "forward":
            overflow(len(x))
        found: torch.Tensor = self.layers(x)
        found = Keeps.apply(found)
        return Raises.apply(found) if options.raises_in == "backward" else found


run = atoll.init(seed=7)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(options.batch_size * options.steps, 8, generator=generator)
targets = inputs @ torch.randn(8, 1, generator=generator)
dataset = torch.utils.data.TensorDataset(inputs, targets, torch.arange(len(inputs)))
torch.manual_seed(5)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
given = {"scheduler": scheduler} if options.scheduler else {}
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=options.batch_size, **given)

options.out.mkdir(parents=True, exist_ok=True)
with (options.out / f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{rank}.jsonl").open("a") as log:
    for _ in run.epochs(1):
        for x, y, ids in loader:
            line = {
                "view": int(os.environ.get("ATOLL_VIEW", "1")),
                "step": loader.current.step,
                "epoch": 0,
                "ids": ids.tolist() if loader.current.local else [],
                "weight": loader.current.weight,
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            if options.raises_in == "script":
                overflow(len(x))
            time.sleep(options.sample_s * len(x))  # pretended work, not a wait for anything
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(loss)
            optimizer.step()
            if options.scheduler:
                scheduler.step()
            run.report(loss=loss.item())
if run.is_main:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    (options.out / "final.json").write_text(json.dumps({"weights": weights.tolist(), "steps": run.step}))
