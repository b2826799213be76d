"""A small model under strategy compressed, by AdamW.

OUT/run-N-rank-R.jsonl has a line for each batch; OUT/run-N-rank-R.end (torch.save) the weights, OUT/run-N-rank-R.left
what this rank left out, OUT/run-N-rank-R.own that and its momentum, and OUT/run-N-rank-R.sums what
its gradients added up to."""

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
parser.add_argument("--linear", action="store_true", help="gradients do not depend on the weights; plain SGD")
parser.add_argument("--bad", default="", help="STEP:VALUE: an entry of rank 1's gradient in this step")
parser.add_argument("--fault", default="", help="STEP:STAGE:WHAT of rank 1: before it sends, it is killed or lies")
parser.add_argument("--await-stop-at", type=int, default=-1, help="rank 0 waits in this step for a stop")
parser.add_argument("--hold-at", type=int, default=-1, help="in memory every step up to this, in which all wait")
options = parser.parse_args()

SAMPLES, BATCH = 96, 12
run = atoll.init(seed=7)
RUN = f"run-{os.environ.get('ATOLL_RUN', '0')}"
NAME = f"{RUN}-rank-{run.rank}"


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 20, generator=generator),
        torch.randn(SAMPLES, 4, generator=generator),
        torch.arange(SAMPLES),
    )


def lying(payload: memoryview, what: str) -> bytes:
    """Offsets are of the header: form, counts, first entry, entries; behind it counts, then a count of indices."""
    message = bytearray(payload)
    if what == "too much":
        message += bytes(10**6)
    elif what == "outside":
        (counts,) = struct.unpack_from("<I", message, 4)
        (there,) = struct.unpack_from("<I", message, 24 + 4 * counts)
        struct.pack_into("<I", message, 24 + 4 * counts + 4 * there, 2**31)
    else:
        raise ValueError(what)
    return bytes(message)


torch.manual_seed(7)
model = nn.Linear(20, 4) if options.linear else nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer: torch.optim.Optimizer = (
    torch.optim.SGD(model.parameters(), lr=1.0) if options.linear else torch.optim.AdamW(model.parameters(), lr=0.01)
)
model, optimizer, loader = run.prepare(model, optimizer, data(), batch_size=BATCH)
weight = next(iter(model.parameters()))


def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
    """Before it is accumulated."""
    if options.bad and run.rank == 1 and run.step == int(options.bad.split(":")[0]):
        gradient = gradient.clone()
        gradient.view(-1)[3] = float(options.bad.split(":")[1])
        return gradient
    return None


weight.register_hook(spoil)  # type: ignore[no-untyped-call]
if options.hold_at >= 0:
    keep_every_step()
try:
    with faulty(run, options.fault, lying, options.out / f"{RUN}-rank-0.jsonl"):
        for _ in run.epochs(options.epochs):
            for inputs, targets, samples in loader:
                if options.hold_at >= 0:
                    await_generation(run)
                while run.step == options.hold_at:
                    time.sleep(0.01)
                if run.step == options.await_stop_at and run.is_main:
                    while run._session.link is not None and run._session.link.stop is None:
                        time.sleep(0.005)
                outputs = model(inputs)
                loss = (
                    (outputs * torch.linspace(-1, 1, 4)).sum(dim=1).mean()
                    if options.linear
                    else nn.functional.mse_loss(outputs, targets)
                )
                run.backward(loss)
                if options.bad and run.step == int(options.bad.split(":")[0]):
                    assert weight.grad is not None
                    odd = (~weight.grad.isfinite()).sum().item()
                    assert odd == 1, f"{odd} entries are not finite on rank {run.rank}"
                    weight.grad.nan_to_num_(0.0, 0.0, 0.0)
                optimizer.step()
                optimizer.zero_grad()
                line = {"step": run.step, "samples": samples.tolist(), "loss": loss.item()}
                with (options.out / f"{NAME}.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
finally:
    torch.save({name: one.detach() for name, one in model.named_parameters()}, options.out / f"{NAME}.end")
    if run._training is not None and hasattr(run._training._current.driver.durable, "_residuals"):
        left = run._training._current.driver.durable._residuals.by_name()
        torch.save({name: one.clone() for name, one in left.items()}, options.out / f"{NAME}.left")
        own = run._training._current.driver.durable.own_at_boundary()
        torch.save({name: one.clone() for name, one in own.items()}, options.out / f"{NAME}.own")
