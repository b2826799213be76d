"""A small regression that writes down everything it did: OUT/run-N-rank-R.jsonl, one line per batch."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from generations import await_generation, keep_every_step
from stopping import await_stop
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--sleep-s", type=float, default=0.0, help="pretended work per step")
parser.add_argument("--own-backward", action="store_true", help="call loss.backward(), as unported scripts do")
parser.add_argument("--checkpoints", type=Path, help="where to save, without an agent")
parser.add_argument("--leave-at", type=int, default=-1, help="rank 1 calls sys.exit(3) in this step")
parser.add_argument("--hidden", type=int, default=16, help="another number is another model")
parser.add_argument("--adam", action="store_true", help="an optimizer that keeps a counter and two moments")
parser.add_argument("--await-stop-at", type=int, default=-1, help="rank 0 waits in this step for a stop")
parser.add_argument("--often", action="store_true", help="a generation in memory every step")
parser.add_argument("--stream", action="store_true", help="the same samples as a stream, in an order drawn per epoch")
parser.add_argument("--float64", action="store_true", help="parameters that sparse exchanges do not take")
options = parser.parse_args()
if options.float64:
    torch.set_default_dtype(torch.float64)

SAMPLES, BATCH = 100, 12  # 8 whole batches and one of 4 in each epoch


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    return torch.utils.data.TensorDataset(inputs, targets, torch.arange(SAMPLES))


class Stream(torch.utils.data.IterableDataset[Any]):
    """Draws its order from the global generator, and counts what is read of it."""

    def __init__(self, dataset: torch.utils.data.TensorDataset) -> None:
        self.dataset = dataset
        self.at, self.order, self.read = 0, list(range(SAMPLES)), 0

    def __iter__(self) -> Iterator[Any]:
        if self.at == 0:
            random.shuffle(self.order)
        while self.at < SAMPLES:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.dataset[self.order[self.at - 1]]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], list(state["order"])


class Model(nn.Sequential):
    """Counts its forward passes in a buffer, to see that buffers are saved as they were at the boundary."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 1))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x)


run = atoll.init(seed=7, checkpoint_directory=options.checkpoints)
model = Model()
if options.adam:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
dataset: Any = Stream(data()) if options.stream else data()
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=BATCH, scheduler=scheduler)

if options.often:
    keep_every_step()
begun_step = run.step
name = f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{run.rank}.jsonl"
with (options.out / name).open("a", buffering=1) as log:
    try:
        for epoch in run.epochs(options.epochs):
            for x, y, ids in loader:
                time.sleep(options.sleep_s)
                if options.often:
                    await_generation(run)
                loss = nn.functional.mse_loss(model(x), y)
                batch_slice = loader.current
                line = {
                    "step": batch_slice.step,
                    "epoch": epoch,
                    "ids": ids.tolist() if batch_slice.local else [],
                    "loss": loss.item().hex(),
                    "weight": batch_slice.weight,
                    "lr": optimizer.param_groups[0]["lr"],
                    "factor": run.learning_rate_factor,
                    "total_batch": run.total_batch,
                    "random": torch.rand(()).item().hex(),
                    "passes": int(model.passes),
                }
                if run.rank == 1 and batch_slice.step == options.leave_at:
                    sys.exit(3)
                if batch_slice.step == options.await_stop_at and run.rank == 0:
                    await_stop(run)
                if options.own_backward:
                    loss.backward()
                else:
                    run.backward(loss)
                if batch_slice.step >= begun_step:  # at an epoch's end the last batch is shown again
                    log.write(json.dumps(line) + "\n")
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            run.report(loss=loss.item(), epoch=epoch)
        if options.stream:
            (options.out / f"read-{os.environ['ATOLL_RUN']}-{run.rank}").write_text(str(dataset.read))
    except Exception as error:  # noqa: BLE001 - careless scripts do this; Atoll's exits must get through
        print(f"the script swallowed {error!r}", flush=True)
