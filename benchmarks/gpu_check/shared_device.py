"""Stage 7: two ranks that share one device, by gloo on its tensors, train as one process of plain torch does.

Timings of ranks that share a device say nothing; whether they train rightly does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from deviations import deviation
from held_ports import free_port
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from zmq_agent import torchrun_environment

from gpu_check.processes import wait_for_all
from gpu_check.rows import Measured, Rows
from gpu_check.training_steps import Batch, Shape

SCRIPT: Final = Path(__file__).resolve().parents[1] / "scripts" / "gpu_shared_train.py"
RANKS: Final = 2
STEPS: Final = 8
LIMIT_S: Final = {"cuda": 80.0, "cpu": 240.0}
SHAPES: Final = {
    "cuda": Shape("10 M", width=256, layers=8, heads=8, context=128, vocabulary=16384, batch=8),
    "cpu": Shape("0.1 M", width=64, layers=2, heads=2, context=32, vocabulary=256, batch=4),
}
MAX_DEVIATION: Final = 2e-3
"""Of weights from plain torch's, as a share of the way that those went."""
WAYS: Final[Mapping[str, bool]] = {
    "dense": True,
    "zen": True,
    "compressed/exact": True,
    "local-steps/exact": True,
    "stale-sparse/exact": True,
    "compressed": False,
    "local-steps": False,
    "stale-sparse": False,
}
"""Strategies of the conformance matrix; True: it has to end with plain torch's weights."""


class Plan:
    """The model, samples and order that every rank and plain torch train alike."""

    def __init__(self, shape: Shape, steps: int) -> None:
        """steps: of an epoch."""
        self.shape, self._steps = shape, steps

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.shape.model("cpu")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return one whose updates add up: ranks' updates by their own gradients are the update by the mean."""
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loader(self) -> DataLoader[Any]:
        torch.manual_seed(2)
        return DataLoader(self.shape.data(self._steps), self.shape.batch)


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    backward: Callable[[torch.Tensor], None],
) -> None:
    for inputs, targets in batches:
        backward(functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
        optimizer.step()
        optimizer.zero_grad()


def run(device: str, rows: Rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        processes = _started(device, out)
        write_reference(Plan(SHAPES[device], STEPS), device, 1, out)
        wait_for_all(processes, LIMIT_S[device])
        for one in processes:
            one.kill()
            one.wait()
        said = "\n".join((out / f"rank-{rank}.log").read_text()[-1500:] for rank in range(RANKS))
        for way in WAYS:
            holds, text, figures = _compared(way, out)
            rows.check(way, holds, text, **figures)
            if "not reached" in text:
                print(said)
                break


def _started(device: str, out: Path) -> list[subprocess.Popen[bytes]]:
    ports = ",".join(str(free_port()) for _ in WAYS)
    found = []
    for rank in range(RANKS):
        environment = os.environ | torchrun_environment(rank, RANKS, 0)
        if device == "cuda":
            del environment["CUDA_VISIBLE_DEVICES"]  # tests hide it
        with (out / f"rank-{rank}.log").open("wb") as log:
            command = [sys.executable, str(SCRIPT), str(out), ports]
            found.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return found


def write_reference(plan: Plan, device: str, epochs: int, out: Path) -> None:
    """Train by plain torch on whole batches; write the weights before and after."""
    model = plan.model()
    torch.save(model.state_dict(), out / "start.pt")
    model.to(device)
    loader = plan.loader()
    batches = ([one.to(device) for one in batch] for _ in range(epochs) for batch in loader)
    trained(model, plan.optimizer(model), batches, torch.autograd.backward)
    torch.save({name: one.cpu() for name, one in model.state_dict().items()}, out / "whole.pt")


def ranks_weights(paths: Sequence[Path]) -> tuple[bool, str, Mapping[str, torch.Tensor]]:
    """Return whether the ranks' weights are equal and finite, that in words, and rank 0's."""
    first, *others = (torch.load(path, weights_only=True) for path in paths)
    same = all(torch.equal(first[name], other[name]) for other in others for name in first)
    finite = all(bool(one.isfinite().all()) for one in first.values())
    said = ("equal" if same else "DIFFERENT") if finite else "NOT FINITE"
    return same and finite, f"{said} weights on {len(paths)} ranks", first


def off_reference(weights: Mapping[str, torch.Tensor], out: Path) -> float:
    """Return the distance from plain torch's weights, as a share of the way that those went."""
    start, whole = (torch.load(out / name, weights_only=True) for name in ("start.pt", "whole.pt"))
    return max(deviation(weights[name], whole[name], start[name]) for name in weights)


def _compared(way: str, out: Path) -> Measured:
    paths = [out / f"{way.replace('/', '-')}-{rank}.pt" for rank in range(RANKS)]
    if not all(path.exists() for path in paths):
        ends = (line for rank in range(RANKS) for line in (out / f"rank-{rank}.log").read_text().splitlines()[-1:])
        return False, f"not reached: {' / '.join(ends)}", {}
    right, said, weights = ranks_weights(paths)
    off = off_reference(weights, out)
    lines = [json.loads(line) for line in (out / "rank-0.jsonl").read_text().splitlines()]
    sent = next(line["sent_bytes"] for line in lines if line["way"] == way) / STEPS
    sent_text = "" if math.isnan(sent) else f", {sent / 1e6:.2f} MB a step"
    return right and (off <= MAX_DEVIATION or not WAYS[way]), f"{said}, off by {off:.1e}{sent_text}", {"deviation": off}
