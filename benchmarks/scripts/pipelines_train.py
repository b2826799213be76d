"""Trains a small model in stages under strategy groups; layers wait as long as a device would compute.

python pipelines_train.py OUT FORWARD_S SPEEDS SLOWER ROUNDS ROUND_BATCHES MICRO_BATCHES [SPLIT_AT]. A layer's forward
pass takes FORWARD_S, its backward pass twice that, divided by the speed of its stage's device (SPEEDS: one for each
stage, "1,0.6,0.3"); all of the last pipeline SLOWER times as long. Rank R writes a line for each round to
OUT/rounds-R.jsonl: seconds since its first round began, the loss, and the share of all batches in which it waited
for other stages."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll

BATCH = 32
LAYERS = 12


class Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Block(nn.Module):
    def __init__(self, seconds: float, inputs: int = 32, outputs: int = 32) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(inputs, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Paced.apply(torch.tanh(self.linear(inputs)), self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def main() -> None:
    out, forward_s = Path(sys.argv[1]), float(sys.argv[2])
    speeds = [float(one) for one in sys.argv[3].split(",")]
    slower, rounds, round_batches, micro_batches = float(sys.argv[4]), *(int(one) for one in sys.argv[5:8])
    torch.set_num_threads(1)
    run = atoll.init(seed=5)
    stages = len(speeds)
    pipelines = run.world_size // stages
    last = run.rank // stages == pipelines - 1
    seconds = forward_s / speeds[run.rank % stages] * (slower if last else 1.0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rounds * round_batches * pipelines * BATCH, 32, generator=generator)
    labels = (inputs @ torch.randn(32, 10, generator=generator)).argmax(1)
    layers = [*(lambda: Block(seconds) for _ in range(LAYERS - 1)), lambda: Block(seconds, outputs=10)]
    train_round, loader = run.prepare_pipeline(
        layers,
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        nn.functional.cross_entropy,
        torch.utils.data.TensorDataset(inputs, labels),
        BATCH,
        micro_batches,
        split_at=sys.argv[8].split(",") if len(sys.argv) > 8 else None,
        round_batches=round_batches,
    )
    begun_s = time.monotonic()
    for _ in run.epochs(1):
        for each in loader:
            loss = train_round(each).item()
            run.report(loss=loss)
            with (out / f"rounds-{run.rank}.jsonl").open("a") as file:
                bubble = run.statistics()["bubble_share"]
                file.write(json.dumps({"s": time.monotonic() - begun_s, "loss": loss, "bubble": bubble}) + "\n")


if __name__ == "__main__":
    main()
