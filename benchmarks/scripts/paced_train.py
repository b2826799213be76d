"""Trains a small network whose passes wait as long as a device with so much work would compute: PACE_S a sample.

python paced_train.py OUT SECONDS. Three workers on two cores are no three devices: each slows the others down. Waiting
leaves them independent, and all else (processes, telemetry, collectives, plans) is real. Rank 0 takes as many times
longer as the file OUT says, where there is one. Every pass is off by a few per cent, as devices are.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll

PACE_S = 0.0004  # of which a third in the forward pass
FIXED_S = 0.004
NOISE = 0.03
BATCH = 256
SLOWER_FROM = "slower from step"


class Wait(torch.autograd.Function):
    """Waits in the forward pass and in the backward pass, as long as `work` says: (forward, backward) seconds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)  # the pretended work, not a wait for anything
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


def waited(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    found: torch.Tensor = Wait.apply(x, forward_s, backward_s)  # type: ignore[no-untyped-call]
    return found


def main() -> None:
    out, seconds = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    run = atoll.init(seed=5)
    inputs = torch.randn(65_536, 32, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=BATCH)
    ends, slower = time.monotonic() + seconds, 1.0
    for _ in run.epochs(1_000_000):
        for x, y in loader:
            if run.rank == 0 and slower == 1.0 and out.exists():
                slower = float(out.read_text())
                print(f"{SLOWER_FROM} {run.step}", flush=True)
            work_s = slower * (FIXED_S + PACE_S * len(x)) * random.lognormvariate(0.0, NOISE)
            loss = nn.functional.mse_loss(waited(model(x), work_s / 3, 2 * work_s / 3), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if time.monotonic() > ends:
                return


if __name__ == "__main__":
    main()
