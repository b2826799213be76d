"""Train a small model on MNIST in the time that unequal devices would take.

python paced_mnist.py OUT BATCH LEARNING_RATE SEED [MODEL]. adaptive_batch.py and adaptation_pays.py submit it. Every
pass computes the true gradients and then waits until a device of SPEEDS[rank] would be done with so many samples. So
convergence is real, and time is that of devices that do not share this machine's cores. Rank 0 writes its weights to
OUT every half second, as seconds-since-its-first-step.npy. MODEL is one of MODELS.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import mnist
from torch import nn

import atoll

SPEEDS = (1.0, 0.6, 0.3)
FIXED_S, SAMPLE_S = 0.016, 0.0002  # of a step at speed 1, a third in the forward pass
NOISE = 0.03
KEPT_EVERY_S = 0.5


class Ends(torch.autograd.Function):
    """Its forward pass ends at until_s; its backward pass calls `then`, and ends at what that returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, until_s: float, then: Any) -> torch.Tensor:
        ctx.then = then
        time.sleep(max(until_s - time.monotonic(), 0.0))  # the pretended work, not a wait for anything
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(max(ctx.then() - time.monotonic(), 0.0))
        return grad, None, None


def ends(x: torch.Tensor, until_s: float, then: Any) -> torch.Tensor:
    found: torch.Tensor = Ends.apply(x, until_s, then)  # type: ignore[no-untyped-call]
    return found


class Pace:
    """One pass at a time: when its parts should end."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._work_s = self._backward_s = 0.0

    def through(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self._work_s = (FIXED_S + SAMPLE_S * len(x)) / self._speed * random.lognormvariate(0.0, NOISE)
        began_s = time.monotonic()
        inside = ends(x.requires_grad_(), began_s, self._backward_ends)
        return ends(model(inside), began_s + self._work_s / 3, self._backward_begins)

    def _backward_begins(self) -> float:
        self._backward_s = time.monotonic()
        return self._backward_s

    def _backward_ends(self) -> float:
        return self._backward_s + 2 * self._work_s / 3


def cnn() -> nn.Module:
    """Return a network of 9,226 parameters: links do not matter to it."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 10)),
    )


def mlp() -> nn.Module:
    """Return a network of 0.67 M parameters, 2.7 MB of gradients in a step."""
    return nn.Sequential(
        nn.Flatten(), *(nn.Linear(784, 512), nn.ReLU()), *(nn.Linear(512, 512), nn.ReLU()), nn.Linear(512, 10)
    )


MODELS = {"cnn": cnn, "mlp": mlp}
OPTIMIZERS = {"cnn": torch.optim.SGD, "mlp": torch.optim.AdamW}


def make(seed: int, model: str = "cnn") -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[model]()


def main() -> None:
    out, batch, learning_rate, seed = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    name = sys.argv[5] if len(sys.argv) > 5 else "cnn"
    torch.set_num_threads(1)
    run = atoll.init(seed=seed)
    train, _ = mnist()
    model: Any = make(seed, name)
    optimizer: Any = OPTIMIZERS[name](model.parameters(), lr=learning_rate)
    model, optimizer, loader = run.prepare(model, optimizer, train, batch_size=batch)
    pace, begun_s, kept_s = Pace(SPEEDS[run.rank]), None, 0.0
    for _ in run.epochs(1_000_000):
        for x, y in loader:
            begun_s = begun_s or time.monotonic()
            run.backward(nn.functional.cross_entropy(pace.through(model, x), y))
            optimizer.step()
            optimizer.zero_grad()
            now_s = time.monotonic() - begun_s
            if run.is_main and now_s >= kept_s + KEPT_EVERY_S:
                kept_s = now_s
                keep(model, out, f"{now_s:09.3f}-{run.step}-{run.total_batch}")


def keep(model: nn.Module, out: Path, name: str) -> None:
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    with (out / "part").open("wb") as file:
        np.save(file, weights)
    os.replace(out / "part", out / f"{name}.npy")


if __name__ == "__main__":
    main()
