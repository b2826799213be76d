"""Accumulates gradients over eight batches of an update and writes down what it did: OUT/run-N-rank-R.jsonl, one line
per batch with what was exchanged in it, and .end."""

from __future__ import annotations

import argparse
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("how", choices=["no-sync", "every-pass", "no-last"])
parser.add_argument("--clip", action="store_true")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--settings", type=json.loads, help="of atoll.StaleSparse, where no agent tells them")
parser.add_argument("--adam", action="store_true")
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--overflow-at", type=int, default=-1, help="rank 1's loss is infinite in this step")
parser.add_argument("--die-at", type=int, default=-1, help="rank 1 is killed in this step, before its gradients")
options = parser.parse_args()

GROUP, BATCH = 8, 12
SAMPLES = 18 * BATCH + 4  # of which the last group is 2 batches and 4 samples
run = atoll.init(seed=7, strategy=atoll.StaleSparse(**options.settings) if options.settings is not None else "dense")
reduced: list[int] = []  # entries of all-reduces of gradients
all_reduce = dist.all_reduce


def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.dtype == torch.float32:
        reduced.append(tensor.numel())
    else:
        agreed.append(tensor.numel())
    return all_reduce(tensor, *args, **kwargs)


agreed: list[int] = []
dist.all_reduce = counting
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(SAMPLES, 8, generator=generator)
data = torch.utils.data.TensorDataset(inputs, (inputs @ torch.randn(8, 1, generator=generator)).tanh())


class Model(nn.Module):
    """`sometimes` trains in the first batch of a group alone, `never` in none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.sometimes, self.never = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out + self.sometimes(x) if first else out


model = Model()
family: Any = torch.optim.AdamW if options.adam else torch.optim.SGD
optimizer = family(model.parameters(), lr=0.002) if options.adam else family(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=options.scaler)
run.track("scaler", scaler)
model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=BATCH, shuffle=False)
name = f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{run.rank}"
begun_step = run.step
with (options.out / f"{name}.jsonl").open("a", buffering=1) as log:
    for _ in run.epochs(options.epochs):
        for index, (x, y) in enumerate(loader):
            step = run.step
            update = (index + 1) % GROUP == 0 or run.last_batch
            if run.rank == 1 and step == options.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.mse_loss(model(x, index % GROUP == 0), y)
            if run.rank == 1 and step == options.overflow_at:
                loss = loss * torch.inf
            reduced.clear()
            agreed.clear()
            word = run.no_sync() if not update and options.how.startswith("no-") else nullcontext()
            if options.how == "no-last":
                word = run.no_sync()
            with word:
                run.backward(scaler.scale(loss / GROUP))
            if update:
                scaler.unscale_(optimizer)
                if options.clip:
                    run.clip_grad_norm(0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if step >= begun_step:  # at an epoch's end the last batch is shown again
                line = {"step": step, "loss": loss.item().hex(), "reduced": sum(reduced), "agreed": len(agreed)}
                log.write(json.dumps(line) + "\n")
assert run._training is not None
local: Any = getattr(run._training._current.driver, "update", None)
end = {
    "weights": [one.detach() for one in model.parameters()],
    "moments": optimizer.state_dict(),
    "rounds": local._round if local is not None else 0,
    "sent_bytes": run.statistics().get("sent_bytes", 0.0),
    "scale": scaler.get_scale() if options.scaler else 0.0,
}
torch.save(end, options.out / f"{name}.end")
