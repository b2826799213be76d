"""A small model of words under strategy zen: a sparse table by SparseAdam, the rest by AdamW.

OUT/run-N-rank-R.jsonl has a line for each batch; OUT/run-N-rank-R.end (torch.save) the weights."""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from pathlib import Path

import torch
from faulty_peer import faulty
from generations import await_generation, keep_every_step
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dense", action="store_true", help="the table's gradients are dense")
parser.add_argument("--words", type=int, default=400)
parser.add_argument("--turn-dense-at", type=int, default=-1, help="rank 1's sparse gradient is dense in this step")
parser.add_argument("--fill-at", type=int, default=-1, help="rank 1's dense gradient has no zero in this step")
parser.add_argument("--bad", default="", help="STEP:VALUE: an entry of rank 1's gradient in this step")
parser.add_argument("--fault", default="", help="STEP:STAGE:WHAT of rank 1: before it sends, it is killed or lies")
parser.add_argument("--await-stop-at", type=int, default=-1, help="rank 0 waits in this step for a stop")
parser.add_argument("--hold-at", type=int, default=-1, help="in memory every step up to this, in which all wait")
options = parser.parse_args()

SAMPLES, BATCH = 96, 12
run = atoll.init(seed=7)
RUN = f"run-{os.environ.get('ATOLL_RUN', '0')}"
NAME = f"{RUN}-rank-{run.rank}"
BAD_AT = int(options.bad.split(":")[0]) if options.bad else -1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(options.words, 8, sparse=not options.dense)
        self.last = nn.Linear(8, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(words).mean(dim=1))


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    words = (torch.rand(SAMPLES, 5, generator=generator) ** 3 * options.words).long()
    return torch.utils.data.TensorDataset(words, torch.randn(SAMPLES, 2, generator=generator), torch.arange(SAMPLES))


def lying(payload: memoryview, what: str) -> bytes:
    message = bytearray(payload)
    if what == "too much":
        message += bytes(10**6)
    elif what == "partition":
        struct.pack_into("<I", message, 12, 77)
    else:
        raise ValueError(what)
    return bytes(message)


torch.manual_seed(7)
model = Model()
sparse = [] if options.dense else [torch.optim.SparseAdam(model.table.parameters(), lr=0.02)]
rest = model.parameters() if options.dense else model.last.parameters()
optimizers: list[torch.optim.Optimizer] = [*sparse, torch.optim.AdamW(rest, lr=0.02)]
if options.turn_dense_at >= 0:  # an optimizer that takes both
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.02)]
model, optimizers, loader = run.prepare(model, optimizers, data(), batch_size=BATCH)


def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
    """Before it is accumulated."""
    if run.rank == 1 and options.bad and run.step == BAD_AT:
        gradient = gradient.coalesce()
        gradient.values()[0, 0] = float(options.bad.split(":")[1])
        return gradient
    return None


model.table.weight.register_hook(spoil)  # type: ignore[no-untyped-call]
if options.hold_at >= 0:
    keep_every_step()
try:
    with faulty(run, options.fault, lying, options.out / f"{RUN}-rank-0.jsonl"):
        for _ in run.epochs(options.epochs):
            for words, targets, samples in loader:
                if options.hold_at >= 0:
                    await_generation(run)
                while run.step == options.hold_at:
                    time.sleep(0.01)
                if run.step == options.await_stop_at and run.is_main:
                    while run._link is not None and run._link.stop is None:
                        time.sleep(0.005)
                loss = nn.functional.mse_loss(model(words), targets)
                if run.rank == 1 and run.step == options.turn_dense_at:
                    loss = loss + 0 * model.table.weight.sum()
                if run.rank == 1 and run.step == options.fill_at:
                    loss = loss + (model.table.weight * torch.linspace(0.5, 1.5, options.words)[:, None]).sum()
                run.backward(loss)
                assert model.table.weight.grad is not None
                if run.step not in {options.turn_dense_at, BAD_AT}:
                    assert model.table.weight.grad.is_sparse != options.dense
                elif run.step == BAD_AT:
                    values = model.table.weight.grad.values()
                    assert (~values.isfinite()).sum() == 1, f"rank {run.rank}: {values}"
                    values.nan_to_num_(0.0, 0.0, 0.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                line = {"step": run.step, "samples": samples.tolist(), "loss": loss.item()}
                with (options.out / f"{NAME}.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
finally:
    weights = {name: one.detach() for name, one in model.named_parameters()}
    torch.save(weights, options.out / f"{NAME}.end")
