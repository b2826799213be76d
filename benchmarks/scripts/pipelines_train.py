"""Trains a small model in stages under strategy groups; layers wait as long as a device would compute.

python pipelines_train.py OUT FORWARD_S SPEEDS SLOWER ROUNDS ROUND_BATCHES MICRO_BATCHES [SPLIT_AT]. A layer's forward
pass takes FORWARD_S, its backward pass twice that, divided by the speed of its stage's device (SPEEDS: one for each
stage, "1,0.6,0.3"); all of the last pipeline SLOWER times as long. Rank R writes a line for each round to
OUT/rounds-R.jsonl: seconds since its first round began, the loss, and the share of all batches in which it waited
for other stages. Where there is a folder OUT/weights, the first pipeline leaves the model there as each round ends."""

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
WIDTH, CLASSES = 32, 10
HELD_OUT = 2048


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
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Paced.apply(inputs + torch.tanh(self.linear(inputs)), self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class Head(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Paced.apply(self.linear(inputs), self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def model(seconds: float) -> nn.Sequential:
    """seconds: of a layer's forward pass."""
    return nn.Sequential(*(Block(seconds) for _ in range(LAYERS - 1)), Head(seconds))


def drawn(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and the classes that the teacher gives them."""
    inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))
    teacher = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        return inputs, teacher(inputs).argmax(1)


def held_out_loss(weights: Path, round_: int) -> float:
    """Of the whole model, as this round ended, on samples that nobody trained."""
    whole, (inputs, labels) = model(0.0), drawn(HELD_OUT, seed=3)
    parts = [torch.load(path, weights_only=True) for path in weights.glob(f"*-{round_}.pt")]
    whole.load_state_dict({name: one for part in parts for name, one in part.items()})
    with torch.no_grad():
        return nn.functional.cross_entropy(whole(inputs), labels).item()


def own(whole: nn.Sequential, split_at: str, stage: int) -> dict[str, torch.Tensor]:
    """What this stage holds of the model: the rest is as it was made."""
    cuts = [0, *(int(one) for one in split_at.split(",")), len(whole)] if split_at else [0, len(whole)]
    names = {str(layer) for layer in range(cuts[stage], cuts[stage + 1])}
    return {name: one for name, one in whole.state_dict().items() if name.partition(".")[0] in names}


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
    whole = model(seconds)
    train_round, loader = run.prepare_pipeline(
        whole,
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        nn.functional.cross_entropy,
        torch.utils.data.TensorDataset(*drawn(rounds * round_batches * pipelines * BATCH, seed=2)),
        BATCH,
        micro_batches,
        split_at=sys.argv[8].split(",") if len(sys.argv) > 8 else None,
        round_batches=round_batches,
    )
    weights = out / "weights"
    leaves = weights.is_dir() and run.rank < stages
    begun_s = time.monotonic()
    for _ in run.epochs(1):
        for round_, each in enumerate(loader):
            loss = train_round(each).item()
            run.report(loss=loss)
            with (out / f"rounds-{run.rank}.jsonl").open("a") as file:
                bubble = run.statistics()["bubble_share"]
                file.write(json.dumps({"s": time.monotonic() - begun_s, "loss": loss, "bubble": bubble}) + "\n")
            if leaves:
                torch.save(own(whole, sys.argv[8], run.rank), weights / f"{run.rank}-{round_}.pt")


if __name__ == "__main__":
    main()
