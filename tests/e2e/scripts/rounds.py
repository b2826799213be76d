"""A tiny regression under strategy groups. Each rank appends a line for each round to OUT/rank-R.jsonl: the samples
that it trained in it, and the round's loss; and one for each batch to OUT/rank-R.batches: its samples, before it is
trained. Once OUT/full-speed is there, nothing is slow any more. OUT/last-epoch, where it is, has the number
of the epoch to end with."""

from __future__ import annotations

import argparse
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
parser.add_argument("--slow-rank", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()
run = atoll.init(seed=7)
RANK = int(os.environ.get("ATOLL_RANK", run.rank))  # in the run, for good
options.out.mkdir(parents=True, exist_ok=True)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(360, 8, generator=generator)
targets = inputs @ torch.randn(8, 1, generator=generator)
trained: list[int] = []


def collate(samples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, ids = (torch.stack(one) for one in zip(*samples, strict=True))
    trained.extend(ids.tolist())
    if run._training is not None:  # else it is an example, of which shapes are learned
        at = {"step": run.step, "view": run._session.view, "ids": ids.tolist()}
        with (options.out / f"rank-{RANK}.batches").open("a") as batches:
            batches.write(json.dumps(at) + "\n")
    return x, y


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if not (options.out / "full-speed").exists():
        time.sleep(0.06 if options.slow_rank == RANK else 0.02)  # pretended work, not a wait for anything
    return nn.functional.mse_loss(outputs, targets)


train_round, loader = run.prepare_pipeline(
    nn.Linear(8, 1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    loss_of,
    torch.utils.data.TensorDataset(inputs, targets, torch.arange(len(inputs))),
    batch_size=6,
    round_batches=10,
    collate_fn=collate,
)
with (options.out / f"rank-{RANK}.jsonl").open("a") as log:
    for epoch in run.epochs(options.epochs):
        for each in loader:
            trained.clear()
            loss = train_round(each).item()
            run.report(loss=loss)
            print(json.dumps({"epoch": epoch, "ids": trained, "loss": loss}), file=log, flush=True)
        if (options.out / "last-epoch").exists() and epoch >= int((options.out / "last-epoch").read_text()):
            break
