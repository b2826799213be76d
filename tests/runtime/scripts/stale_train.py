"""A small regression under strategy stale-sparse that writes down everything it did.

OUT/run-N-rank-R.jsonl has a line for each batch. OUT/run-N-rank-R.begin and .end (torch.save) have, by parameter, what
this rank held back and the masters; .end also what its own gradients, weighted by its part of the batch, add up to,
and the model's own weights. .end is written however the run ends, short of being killed."""

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
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--sleep-s", type=float, default=0.0, help="pretended work per step")
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--settings", type=json.loads, help="of atoll.StaleSparse, where no agent tells them")
parser.add_argument("--checkpoints", type=Path, help="where to save, without an agent")
parser.add_argument("--silent-rank", type=int, default=-1, help="this rank's gradients are all zero")
parser.add_argument("--flip-at", type=int, default=-1, help="rank 1 flips a bit of a master before this step")
options = parser.parse_args()

SAMPLES, BATCH = 100, 12  # 8 whole batches and one of 4 in each epoch
run = atoll.init(
    seed=7,
    strategy=atoll.StaleSparse(**options.settings) if options.settings is not None else "dense",
    checkpoint_directory=options.checkpoints,
)
NAME = f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{run.rank}"


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    return torch.utils.data.TensorDataset(inputs, targets, torch.arange(SAMPLES))


model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 1))
family = torch.optim.AdamW if options.adamw else torch.optim.SGD
optimizer = family(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, data(), batch_size=BATCH)
begun_step = run.step
assert run._training is not None
sync: Any = run._training._sync
summed = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in model.named_parameters()}


def keep(what: str) -> None:
    state = {
        "held_back": {layer.name: layer.shaped(layer.residual).clone() for layer in sync._layers},
        "masters": {layer.name: layer.shaped(layer.master).clone() for layer in sync._layers},
        "live": {name: one.detach().clone() for name, one in model.named_parameters()},
        "summed": summed,
        "step": run.step,
    }
    torch.save(state, options.out / f"{NAME}.{what}")


def watch(name: str, parameter: nn.Parameter) -> None:
    def add(gradient: torch.Tensor) -> None:
        cut = loader.current
        if cut.step >= begun_step:  # at an epoch's end the last batch is shown again
            summed[name].add_(gradient.double(), alpha=cut.weight)

    parameter.register_hook(add)


for parameter_name, one in model.named_parameters():
    watch(parameter_name, one)
keep("begin")
with (options.out / f"{NAME}.jsonl").open("a", buffering=1) as log:
    try:
        for epoch in run.epochs(options.epochs):
            for x, y, ids in loader:
                time.sleep(options.sleep_s)
                if run.rank == 1 and run.step == options.flip_at:
                    sync._layers[2].master.view(torch.int32)[5] ^= 1
                loss = nn.functional.mse_loss(model(x), y) * (run.rank != options.silent_rank)
                cut = loader.current
                run.backward(loss)
                if cut.step >= begun_step:
                    trained = {"step": cut.step, "epoch": epoch, "ids": ids.tolist() if cut.local else []}
                    log.write(json.dumps(trained | {"loss": loss.item()}) + "\n")
                optimizer.step()
                optimizer.zero_grad()
    finally:
        keep("end")
