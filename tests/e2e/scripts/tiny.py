"""A tiny regression whose every trained sample is written down, for checking that each counted exactly once.

Each rank appends one line per batch to OUT/run-N-rank-R.jsonl, before it is trained: {"step", "epoch", "ids", "loss"}.
A run's last line may thus be of a step that was not completed; the next run then trains that step again.
Once there is a file OUT/full-speed, steps take no longer than they must, and with --ends-early no further epoch begins.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import slow_disk
import torch
import without_compiler  # noqa: F401
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=600)
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--step-s", type=float, default=0.02, help="pretended work per step and worker")
parser.add_argument("--sample-s", type=float, default=0.0, help="pretended work per sample, beside that of a step")
parser.add_argument("--late-s", type=float, default=0.0, help="more of it in each step, of who was not there at first")
parser.add_argument("--hang-at", type=int, default=-1, help="in this step the last rank of run 1 waits for ever")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--disk-s", type=float, default=0.0, help="how long a disk takes for a piece of a checkpoint")
parser.add_argument("--own-schedule", action="store_true", help="one that the run is not told of")
parser.add_argument("--ends-early", action="store_true", help="with the epoch in which OUT/full-speed comes")
parser.add_argument("--evaluate-s", type=float, default=0.0, help="pretended evaluation by rank 0 after training")
options = parser.parse_args()

if options.disk_s:
    slow_disk.install(options.disk_s)
run = atoll.init(seed=7)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(options.samples, 8, generator=generator)
targets = inputs @ torch.randn(8, 1, generator=generator)
dataset = torch.utils.data.TensorDataset(inputs, targets, torch.arange(options.samples))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=options.batch_size)
if options.own_schedule:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

options.out.mkdir(parents=True, exist_ok=True)
rank = os.environ.get("ATOLL_RANK", run.rank)
step_s = options.step_s + (options.late_s if int(rank) >= 2 else 0.0)
with (options.out / f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{rank}.jsonl").open("a") as log:
    for epoch in run.epochs(options.epochs):
        for x, y, ids in loader:
            if not (options.out / "full-speed").exists():
                time.sleep(step_s + options.sample_s * len(x))  # pretended work, not a wait for anything
            loss = nn.functional.mse_loss(model(x), y)
            batch_slice = loader.current
            if (
                batch_slice.step == options.hang_at
                and os.environ.get("ATOLL_RUN") == "1"
                and run.rank == run.world_size - 1
            ):
                threading.Event().wait()
            line = {
                "view": int(os.environ.get("ATOLL_VIEW", "1")),
                "step": batch_slice.step,
                "epoch": epoch,
                "ids": ids.tolist() if batch_slice.local else [],
                "loss": loss.item(),
                "weight": batch_slice.weight,
                "at": time.time(),
            }
            # Before the other ranks can have this batch's gradients: a kill right behind the exchange would leave the
            # batch trained and not written down.
            log.write(json.dumps(line) + "\n")
            log.flush()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.report(loss=loss.item())
        if options.ends_early and any(run.sum(float((options.out / "full-speed").exists()))):
            break
if run.is_main:
    (options.out / "evaluating").touch()
    time.sleep(options.evaluate_s)
    digest = torch.cat([p.detach().flatten() for p in model.parameters()])
    (options.out / "final.json").write_text(json.dumps({"step": run.step, "weights": digest.tolist()}))
    print("trained to the end", flush=True)
